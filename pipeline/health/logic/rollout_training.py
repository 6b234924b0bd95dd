"""Checks that inference server and trainer agree on the logprobs of the same tokens."""

import math
from collections.abc import Sequence

from lachesis.pipeline.health.logic.check import (
    AGREEING_K3,
    CheckResult,
    RunSettings,
)
from lachesis.schemas.ledger import EnvMismatch, Mismatch

__all__ = ["RolloutTraining"]


class RolloutTraining:
    """The difference between the logprobs of inference server and trainer for the environment's tokens, as the trainer
    reports it with a checkpoint: |k1| > .1, an effective sample size < .3 or a mean ratio outside [.5, 2] warn, k3 > 1
    halts (see `EnvMismatch`). Tokens of other environments count only if the trainer does not distinguish them. It is
    read with the staleness, which widens it; the value is k3, of the worst step. Where too large a step is the reason
    (see `StepSizeCheck`), it warns and names that."""

    name = "rollout_training"

    def __init__(self, settings: RunSettings) -> None:
        sampled, trained = settings.sampling_temperature, settings.trainer_temperature
        self._hint = ""
        if sampled is not None and sampled != trained:
            self._hint = (
                f"; rollouts are sampled at temperature {sampled:g}, training.learner.temperature is {trained:g}"
            )
        self._env = settings.env
        self._steps: list[EnvMismatch] = []
        self._others: list[tuple[str, EnvMismatch]] = []

    def record_mismatch(self, steps: Sequence[Mismatch]) -> None:
        """Take in the steps of a report; those without a token of the environment say nothing of it."""
        for step in steps:
            if (own := step.of_env(self._env)) is not None:
                self._steps.append(own)
                self._others += [(env, one) for env, one in (step.envs or {}).items() if env != self._env]

    def evaluate(self, examples: Sequence[str], explanation: str | None = None) -> CheckResult:
        """Judge what was added since the last time, and forget it.

        `examples` are groups that were trained. `explanation` says why the two differ where their policy is the same.
        """
        steps, self._steps = self._steps, []
        others, self._others = self._others, []
        if not steps:
            return CheckResult("idle", reason="no report")
        if any(None in (step.k1, step.k3, step.ratio, step.ess) for step in steps):
            return CheckResult("warn", reason="not a number: their ratio is undefined", examples=examples)
        worst = max(k3 for step in steps if (k3 := step.k3) is not None)
        if worst > 1 and explanation:
            return CheckResult("warn", worst, 1.0, explanation, examples)
        if worst > 1:
            reason = f"rollout and training are of different policies{self._hint}{_whose_fault(others)}"
            return CheckResult("halt", worst, 1.0, reason, examples)
        k1, ess = max(abs(step.k1 or 0.0) for step in steps), min(step.ess or 0.0 for step in steps)
        ratios = [step.ratio or 0.0 for step in steps]
        if k1 > 0.1 or ess < 0.3 or not all(0.5 <= ratio <= 2 for ratio in ratios):
            spread = f"{min(ratios):.2g} to {max(ratios):.2g}"
            reason = f"|k1| up to {k1:.2g}, effective samples down to {ess:.0%}, mean ratio {spread}"
            reason += f"; {explanation}" if explanation else self._hint
            return CheckResult("warn", worst, 1.0, reason, examples)
        return CheckResult("ok", worst, 1.0)


def _whose_fault(others: Sequence[tuple[str, EnvMismatch]]) -> str:
    """Return what other environments of the same steps say of where the fault is, "" if that is nothing."""
    worst: dict[str, float] = {}
    for env, one in others:
        worst[env] = max(worst.get(env, 0.0), math.inf if one.k3 is None else one.k3)
    agreeing = sorted(env for env, k3 in worst.items() if k3 <= AGREEING_K3)
    if not agreeing:
        return ""
    return (
        f"; the trainer agrees with the logprobs of {agreeing[0]}, so look at the client or the server that gave those "
        "of this environment: another model, adapter, temperature or tokenizer"
    )
