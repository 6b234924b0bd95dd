"""Checks by the trainer's own figures whether the optimizer's steps are too large."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis.pipeline.health.logic.check import AGREEING_K3, FAST_STEPS, CheckResult, finite
from lachesis.schemas.ledger import Mismatch
from lachesis.schemas.values import convert_plain

__all__ = ["StepSizeCheck"]

_EXPLAINING_KL = 0.1
"""Nats a token from which on a step, allowed or not, explains that rollouts fall behind the policy that is trained."""
_ENTROPY_LEFT = 0.3
_START_STEPS = 2
_MUCH_TOO_LARGE = 2.0
"""Times the allowed KL from which on a single step warns."""
_REPEAT_STEPS = 8
"""Steps within which a second one that is too large warns."""
_MEND = "lower training.learner.learning_rate, or raise warmup_steps"


class StepSizeCheck:
    """How far the trainer's steps move the policy, as it reports it with a checkpoint; checked with the staleness.

    A step that moved the policy by more KL than the run allows (`training.learner.max_step_kl`, .1 nats a token unless
    set) informs; more than twice as much, or another such step within 8, warns. The first step of AdamW without warm-up
    moves every weight by the full rate, and was the largest of healthy runs. Entropy below .3 of what it was within 32
    steps warns. Tokens sampled a step or more before they are trained then differ from the policy that trains them:
    where that reaches k3 > 1, and the first steps' tokens did agree (k3 <= .1), it halts by this name, not as
    `rollout_training`. Of the first two steps only those count that no large step came before: the tokens of later ones
    are behind it. Tokens of the very policy that trains them must agree, so their difference is never explained by the
    step. If the trainer distinguishes environments, the tokens are those of the environment alone.
    """

    name = "step_size"

    def __init__(self, max_step_kl: float | None, env: str | None = None) -> None:
        self._max_kl, self._env = max_step_kl, env
        self.explanation: str | None = None
        self._steps: list[Mismatch] = []
        self._start: list[float | None] = []  # k3 of the first steps, up to the first large one
        self._moved = False  # whether a large step was among them
        self._entropies: deque[float] = deque(maxlen=FAST_STEPS)
        self._large: deque[bool] = deque(maxlen=_REPEAT_STEPS)  # which of the last steps were beyond the bound

    def record_steps(self, steps: Sequence[Mismatch]) -> None:
        """Take in the steps of a report."""
        self._steps += steps

    @property
    def ends_early(self) -> bool:
        """Whether a step recorded since the last time is too large, which ends a window of batches."""
        allowed = self._max_kl
        return allowed is not None and any(kl > allowed for kl in finite(step.step_kl for step in self._steps))

    def evaluate(self, lag: int, examples: Sequence[str]) -> CheckResult:
        """Evaluate the steps recorded since the last time, and forget them.

        `lag`: steps that the oldest group is behind. `explanation` then says why rollouts and training differ, None
        where the steps are no reason.
        """
        steps, self._steps, self.explanation = self._steps, [], None
        for step in steps:
            if self._moved or len(self._start) == _START_STEPS:
                break
            if (own := step.of_env(self._env)) is not None:
                self._start.append(own.k3)
            self._moved = step.step_kl is not None and step.step_kl > _EXPLAINING_KL
        moves = list(finite(step.step_kl for step in steps))
        largest, left = max(moves, default=None), self._entropy_left(list(finite(step.entropy for step in steps)))
        if largest is None and left is None:
            return CheckResult("idle", reason="no report says how far the steps went")
        found, warns = [], left is not None and left < _ENTROPY_LEFT
        for kl in moves:
            self._large.append(self._max_kl is not None and kl > self._max_kl)
            warns |= self._large[-1] and sum(self._large) > 1
        moved = f"a step moved the policy by KL {largest:.2g} nats a token" if largest is not None else ""
        if largest is not None and self._max_kl is not None and largest > self._max_kl:
            found.append(moved)
            warns |= largest > _MUCH_TOO_LARGE * self._max_kl
        if left is not None and left < _ENTROPY_LEFT:
            found.append(f"the trainer's entropy fell to {left:.0%} within {FAST_STEPS} steps")
        agreed = all(k3 is not None and k3 <= AGREEING_K3 for k3 in self._start)
        owns = [own for step in steps if (own := step.of_env(self._env)) is not None]
        worst = max(finite(own.k3 for own in owns), default=0.0)
        if not found and worst > 1 and agreed and lag > 0 and largest is not None and largest > _EXPLAINING_KL:
            found.append(moved)
            warns = True
        if not found:
            return CheckResult("ok", largest, self._max_kl)
        reason = f"the step is too large: {', and '.join(found)}; {_MEND}"
        if lag > 0 and agreed:
            self.explanation = "a consequence of steps that are too large (see step_size): rollouts are a step behind"
            if worst > 1:
                reason = f"{reason}. Rollouts have fallen behind the policy that is trained, k3 up to {worst:.2g}"
                return CheckResult("halt", largest, self._max_kl, reason, examples)
        return CheckResult("warn" if warns else "inform", largest, self._max_kl, reason, examples)

    def _entropy_left(self, entropies: Sequence[float]) -> float | None:
        """Return the least share that was left of the highest entropy of the steps before it, None without any."""
        least = None
        for entropy in entropies:
            self._entropies.append(entropy)
            highest = max(self._entropies)
            if highest > 0:
                least = min(entropy / highest, 1.0 if least is None else least)
        return least

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the steps."""
        return {
            "start": self._start,
            "moved": self._moved,
            "entropies": list(self._entropies),
            "large": list(self._large),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`."""
        self._start = convert_plain("health state", list[float | None], state["start"])
        self._moved = convert_plain("health state", bool, state.get("moved", False))
        self._entropies = deque((float(value) for value in state["entropies"]), maxlen=FAST_STEPS)
        self._large.extend(state.get("large", []))
