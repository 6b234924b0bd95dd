"""Checks of the policy: entropy, diversity, staleness, and agreement of its logprobs."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, stdev
from typing import Any

from lachesis.pipeline.health.logic.check import (
    AGREEING_K3,
    MAX_EXAMPLES,
    START_WINDOWS,
    Check,
    CheckResult,
    HealthWindow,
    RunSettings,
    graded,
    mean,
)
from lachesis.pipeline.health.logic.trends import longer_share
from lachesis.schemas.ledger import EnvMismatch, Mismatch
from lachesis.schemas.values import convert_plain

__all__ = ["Entropy", "ModeCollapse", "RolloutTraining", "StaleLengths", "Staleness"]

_STALE = 4.0
"""Optimizer steps from which on the age of a group matters to the loss."""
_MIN_STALE_GROUPS = 8
_MAX_LENGTHS = 4096
_LONG = 32
"""Tokens from which on two answers to one task do not come out alike by being right."""


class Entropy(Check):
    """Entropy of the sampled tokens, estimated by -mean logprob, as an average over windows (weight .3), against that
    of the first two: below .3 of it warns, below .1 halts. While the mean score is above that of the first two windows
    by three standard errors, below .3 only informs: a policy that learns becomes surer. The value is 1 - the share, so
    that more is worse. Groups sampled at temperature 0 say nothing of it."""

    name = "entropy"

    def __init__(self) -> None:
        self._start: list[float] = []
        self._start_scores: list[float] = []
        self._average: float | None = None

    def evaluate(self, window: HealthWindow) -> CheckResult:
        drawn = [score.signals for score in window.scores if score.signals and not score.signals.greedy]
        now = mean(value for signals in drawn for value in signals.logprobs)
        if now is None:
            return CheckResult("idle", reason="no logprobs")
        now, scores = max(0.0, -now), window.means()
        score = mean(scores)
        if len(self._start) < START_WINDOWS:
            self._start.append(now)
            self._start_scores += [] if score is None else [score]
            return CheckResult("idle", reason="the first windows are the baseline of the later ones")
        start = sum(self._start) / len(self._start)
        if start < 1e-3:
            return CheckResult("idle", reason="there was no entropy to begin with")
        self._average = now if self._average is None else 0.7 * self._average + 0.3 * now
        share = self._average / start
        first = mean(self._start_scores)
        error = stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0
        learns = first is not None and score is not None and score > first + 3 * error
        severity, threshold = graded(1 - share, [(0.7, "inform" if learns else "warn"), (0.9, "halt")])
        reason = "" if severity == "ok" else f"entropy is {share:.0%} of what it was, {self._average:.3g} nats a token"
        return CheckResult(severity, 1 - share, threshold, reason, window.newest if reason else ())

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start, "scores": self._start_scores, "average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = [float(value) for value in state["start"]]
        self._start_scores = [float(value) for value in state.get("scores", [])]
        self._average = convert_plain("health state", float | None, state["average"])  # type: ignore[arg-type]


class ModeCollapse(Check):
    """The same text again: the greater of two shares warns above .5 and quarantines above .9.

    Within groups: (n - distinct) / (n - 1) of answers of 32 tokens or more; short right answers are alike by being
    right, and those sampled at temperature 0 because they must. Between tasks: the share of samples whose text answers
    another task of the window as well; where that was above a quarter in the first window (yes or no), it is left out.
    Texts are compared by a CRC-32 of their tokens.

    Within the last 256 tokens of answers of 32 or more: 1 - distinct-3, the share of 3-grams that come again, warns
    above .5 if it is more by .2 than in the first window, and informs otherwise. It does no more than that however long
    it lasts: a grid or a table repeats by being right.
    """

    name = "mode_collapse"

    def __init__(self) -> None:
        self._between_at_start: float | None = None
        self._loops_at_start: float | None = None

    def evaluate(self, window: HealthWindow) -> CheckResult:
        reported = [(score, score.signals) for score in window.scores if score.signals and score.signals.texts]
        if not reported:
            return CheckResult("idle", reason="no texts")
        tasks: dict[int, set[str]] = {}
        for score, signals in reported:
            for text in signals.texts:
                tasks.setdefault(text, set()).add(score.item)
        texts = [text for _, signals in reported for text in signals.texts]
        between = sum(len(tasks[text]) > 1 for text in texts) / len(texts)
        if self._between_at_start is None:
            self._between_at_start = between
        within = mean(
            (len(long) - len(set(long))) / (len(long) - 1)
            for score, signals in reported
            if not signals.greedy
            and len(long := [text for text, n in zip(signals.texts, score.lengths, strict=True) if n >= _LONG]) > 1
        )
        again = max(within or 0.0, between if self._between_at_start <= 0.25 else 0.0)
        distinct = mean(signals.distinct for _, signals in reported)
        loops = 0.0 if distinct is None else 1 - distinct
        if self._loops_at_start is None:
            self._loops_at_start = loops
        severity, threshold = graded(again, [(0.5, "warn"), (0.9, "quarantine")])
        if severity != "ok":
            reason = f"{again:.0%} of the answers repeat another one"
            return CheckResult(severity, again, threshold, reason, window.newest, grows=True)
        severity, threshold = graded(loops, [(0.5, "warn" if loops > self._loops_at_start + 0.2 else "inform")])
        reason = "" if severity == "ok" else f"{loops:.0%} of the 3-grams repeat"
        return CheckResult(severity, max(again, loops), threshold, reason, window.newest if reason else ())

    def state_dict(self) -> dict[str, Any]:
        return {"between": self._between_at_start, "loops": self._loops_at_start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._between_at_start = convert_plain("health state", float | None, state["between"])  # type: ignore[arg-type]
        self._loops_at_start = convert_plain("health state", float | None, state.get("loops"))  # type: ignore[arg-type]


class Staleness:
    """Optimizer steps between the policy that made a group and the step that trains it, the 95th percentile over eight
    batches. It judges ledger entries: `record_batch` the lags of a batch's groups, then `evaluate` when eight are in.

    Counted from the policy that sampled its last tokens, more than `bound`, which is what the run allows
    (`batching.max_staleness`), warns: the batcher drops older groups, so the bound was lowered lately or something is
    broken; a quarantine follows where it lasts. Counted from the policy that sampled its first tokens, more than 4
    informs: plain clipped losses lose there what a decoupled one holds (AReaL, arXiv:2505.24298).
    """

    name = "staleness"

    def __init__(self, bound: int) -> None:
        self._bound = float(bound)
        self._lags: deque[tuple[int, int, str]] = deque(maxlen=4096)

    def record_batch(self, first: int, last: int, group: str) -> None:
        """Take in a group of a batch: the lags of its first and of its last tokens."""
        self._lags.append((first, last, group))

    def evaluate(self) -> CheckResult:
        """Judge what was added since the last time, and forget it."""
        lags = list(self._lags)
        self._lags.clear()
        if not lags:
            return CheckResult("idle", reason="no batches")
        bound = self._bound
        last, examples = _p95([(lag, group) for _, lag, group in lags])
        if last > bound:
            reason = f"a twentieth of the groups are {last:.0f} steps old or more when trained; {bound:.0f} are allowed"
            return CheckResult("warn", last, bound, reason, examples, grows=True)
        first, examples = _p95([(lag, group) for lag, _, group in lags])
        if first > _STALE:
            reason = f"in a twentieth of the groups tokens are {first:.0f} steps old or more when trained"
            return CheckResult("inform", first, _STALE, reason, examples)
        return CheckResult("ok", first, min(_STALE, bound))


def _p95(lags: list[tuple[int, str]]) -> tuple[float, list[str]]:
    """Return the 95th percentile of the lags, and the groups with the largest."""
    ordered = sorted(lags)
    return float(ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)][0]), [
        group for _, group in ordered[-MAX_EXAMPLES:]
    ]


class StaleLengths:
    """Groups that were dropped as stale against those that were trained: how often, taking one of each at random, the
    dropped one is longer (Mann & Whitney 1947; ties count half). It knows no unit: doubling every length changes
    nothing.

    > .65 warns where chance is ruled out (z > 3.3) and 8 groups or more were dropped: long answers are sorted out, and
    the policy learns from short ones. It is judged with the staleness.
    """

    name = "stale_lengths"

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_MAX_LENGTHS)
        self._stale: deque[float] = deque(maxlen=_MAX_LENGTHS)

    def record_lengths(self, kept: Iterable[float], stale: Iterable[float]) -> None:
        """Take in tokens of a sequence, of groups that are trained and of those dropped as stale."""
        self._kept.extend(kept)
        self._stale.extend(stale)

    def evaluate(self) -> CheckResult:
        """Judge what was added since the last time, and forget it."""
        kept, stale = sorted(self._kept), sorted(self._stale)
        self._kept.clear()
        self._stale.clear()
        if not kept or len(stale) < _MIN_STALE_GROUPS:
            return CheckResult("idle", reason="too few groups were dropped as stale" if kept else "no batches")
        share, z = longer_share(stale, kept)
        severity, threshold = graded(share, [(0.65, "warn")])
        if severity == "ok" or z <= 3.3:
            return CheckResult("ok", share, threshold)
        lengths = f"{median(stale):.0f} tokens a sequence (median), where those trained have {median(kept):.0f}"
        mend = (
            'set batching.staleness_of to "newest" if it is not, raise batching.max_staleness, add inference, or lower '
            "max_new_tokens or the number of turns"
        )
        reason = f"long answers are sorted out: {len(stale)} groups were dropped as stale, of {lengths}; {mend}"
        return CheckResult(severity, share, threshold, reason)


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
