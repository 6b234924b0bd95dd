"""Checks for collapse of the policy: entropy, diversity and scores against the starting model."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from lachesis.pipeline.health.logic.check import FAST_STEPS, LADDER, Check, CheckResult, HealthWindow, finite, mean
from lachesis.schemas.annotations import GroupScore, GroupSignals
from lachesis.schemas.values import convert_plain

__all__ = ["SPAN_GROUPS", "CollapseCheck"]

SPAN_GROUPS = 8
"""Groups that are one observation; the first ones say what the starting model is like."""
_MIN_WINDOW_GROUPS = 16
"""Groups of a window that a collapse may end early."""
_MAX_SPANS = 64
"""Spans remembered, in which a fall is looked for."""
_HIGH, _LOW, _LOWEST = 0.7, 0.3, 0.1
"""Shares of the starting entropy: a fall begins above the first and ends below the second; below the third little of
the policy is left."""
_MORE_ALIKE = 0.35
"""Rise of the shares that answers repeat, each other or themselves, by which they go with a lost entropy."""
_MUCH_MORE_ALIKE = 0.5
_RISE = 0.05
"""Rise of the mean score, as a share of that at the start, that speaks for learning."""


class _Span(msgspec.Struct):
    """Means over the groups of a span; None: no group says it. `step` is the newest policy's."""

    step: int
    entropy: float | None
    equal: float | None
    loops: float | None
    score: float | None


class CollapseCheck(Check):
    """The policy loses its entropy within a few optimizer steps: the step is too large, whatever else is seen of it.

    The first eight groups say what the starting model is like. Entropy (-mean logprob) that falls from above .7 of its
    to below .3 within 32 optimizer steps warns: for two spans of eight groups in a row, or one in which answers are
    more alike as well. Alike means that, by .35 more than at the start, samples of a group are equal or share 3-grams,
    or an answer repeats its own. Then the warning quarantines where it lasts; below .1, with answers alike by .5 more,
    it does so at once. A mean score that is higher than at the start speaks for learning: then it only informs.

    Answers that come to be alike by .5 more without that warn, and do no more. A window of sixteen groups or more ends
    early where a collapse is seen, so that 4 groups a step are enough. The value is 1 - the share of entropy left.
    """

    name = "collapse"

    def __init__(self) -> None:
        self._start: _Span | None = None
        self._spans: deque[_Span] = deque(maxlen=_MAX_SPANS)
        self._open_spans = 0  # of the open window, looked at by `ends_early`

    def evaluate(self, window: HealthWindow) -> CheckResult:
        spans = _spans(window.scores)
        if self._start is None and spans:
            self._start = spans[0]
        self._spans.extend(spans)
        self._open_spans = 0
        if not spans:
            return CheckResult("idle", reason=f"fewer than {SPAN_GROUPS} groups")
        held = list(self._spans)
        found = [
            self._compare_with_start(held[:end]) for end in range(max(1, len(held) - len(spans) + 1), len(held) + 1)
        ]
        worst = max(reversed(found), key=lambda result: LADDER.index(result.severity))
        if worst.severity in {"idle", "ok"}:
            return worst
        return CheckResult(
            worst.severity, worst.value, worst.threshold, worst.reason,
            window.newest, grows=worst.grows,
        )  # fmt: skip

    def ends_early(self, window: HealthWindow) -> bool:
        """Return whether the open window shows lost entropy already."""
        groups = len(window.scores)
        if groups < _MIN_WINDOW_GROUPS or groups // SPAN_GROUPS == self._open_spans:
            return False
        self._open_spans = groups // SPAN_GROUPS
        spans = _spans(window.scores)
        fall = _entropy_fall(self._start or spans[0], [*self._spans, *spans])
        return fall is not None and fall.severity in {"warn", "quarantine"}

    def _compare_with_start(self, spans: Sequence[_Span]) -> CheckResult:
        start, now = self._start, spans[-1]
        if start is None or now is start:
            return CheckResult("idle", reason=f"the first {SPAN_GROUPS} groups are what later ones are compared with")
        fall = _entropy_fall(start, spans)
        if fall is not None:
            return fall
        alike, how = _more_alike(start, now)
        if alike > _MUCH_MORE_ALIKE:
            return CheckResult("warn", alike, _MUCH_MORE_ALIKE, f"answers came to be alike{how}")
        left = _left(start, now)
        return CheckResult("idle", reason="no logprobs") if left is None else CheckResult("ok", 1 - left, 1 - _LOW)

    def state_dict(self) -> dict[str, Any]:
        return {
            "start": None if self._start is None else msgspec.to_builtins(self._start),
            "spans": [msgspec.structs.astuple(span) for span in self._spans],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = None if state["start"] is None else convert_plain("health state", _Span, state["start"])
        names = _Span.__struct_fields__
        self._spans.extend(
            convert_plain("health state", _Span, dict(zip(names, row, strict=True))) for row in state["spans"]
        )


def _entropy_fall(start: _Span, spans: Sequence[_Span]) -> CheckResult | None:
    """Judge the newest span: what an entropy that fell within few steps makes of it, None where it did not."""
    left, before = _left(start, spans[-1]), _left(start, spans[-2]) if len(spans) > 1 else None
    alike, how = _more_alike(start, spans[-1])
    if left is None or left >= _LOW or ((before is None or before >= _LOW) and alike <= _MORE_ALIKE):
        return None
    steps = _steps_of_fall(start, spans)
    if steps is None or steps > FAST_STEPS:
        return None
    fell = f"entropy fell to {left:.0%} of the starting model's within {max(1, steps)} optimizer steps{how}"
    score = spans[-1].score
    if start.score is not None and score is not None and score > start.score + _RISE * abs(start.score):
        reason = f"{fell}, while scores rise: a policy that learns may do that; watch the held-out rate"
        return CheckResult("inform", 1 - left, 1 - _LOW, reason)
    reason = f"{fell}: the step is too large; lower training.learner.learning_rate, or raise warmup_steps"
    if left < _LOWEST and alike > _MUCH_MORE_ALIKE:
        return CheckResult("quarantine", 1 - left, 1 - _LOWEST, reason, grows=True)
    return CheckResult("warn", 1 - left, 1 - _LOW, reason, grows=alike > _MORE_ALIKE)


def _spans(scores: Sequence[GroupScore]) -> list[_Span]:
    """Return as many whole spans as there are; what is left over goes with the last."""
    count = len(scores) // SPAN_GROUPS
    edges = [SPAN_GROUPS * i for i in range(count)] + [len(scores)]
    return [_span(scores[first:last]) for first, last in pairwise(edges)]


def _span(scores: Sequence[GroupScore]) -> _Span:
    drawn = [(score, score.signals) for score in scores if score.signals and not score.signals.greedy]
    entropy = mean(-value for _, signals in drawn for value in finite(signals.logprobs))
    distinct = mean(signals.distinct for _, signals in drawn)
    return _Span(
        step=max(score.policy_step for score in scores),
        entropy=None if entropy is None else max(0.0, entropy),
        equal=mean(_equal(signals) for _, signals in drawn),
        loops=None if distinct is None else 1 - distinct,
        score=mean(value for score in scores for value in score.scores),
    )


def _equal(signals: GroupSignals) -> float | None:
    """Return how alike the samples of a group are: the same texts, or 3-grams that they share."""
    n = len(signals.texts)
    return None if n < 2 else max((n - len(set(signals.texts))) / (n - 1), signals.shared or 0.0)


def _left(start: _Span, now: _Span) -> float | None:
    """Return the share of the starting entropy that is left, None where there was none or it is not known."""
    if start.entropy is None or now.entropy is None or start.entropy < 1e-3:
        return None
    return now.entropy / start.entropy


def _more_alike(start: _Span, now: _Span) -> tuple[float, str]:
    """Return by how much answers are more alike than at the start, and how, in words."""
    rises = {
        "the samples of a group are alike": (start.equal, now.equal),
        "answers repeat themselves": (start.loops, now.loops),
    }
    known = {
        name: (after - before, before, after)
        for name, (before, after) in rises.items()
        if before is not None and after is not None
    }
    if not known:
        return 0.0, ""
    name, (rise, before, after) = max(known.items(), key=lambda item: item[1][0])
    return rise, f", {name} ({before:.0%} -> {after:.0%})" if rise > _MORE_ALIKE else ""


def _steps_of_fall(start: _Span, spans: Sequence[_Span]) -> int | None:
    """Return the optimizer steps from the last span with most of the starting entropy to the first with little of it.

    None: no remembered span had most of it, so the fall was slower than that.
    """
    high = None
    for i in range(len(spans) - 1, -1, -1):
        if (left := _left(start, spans[i])) is not None and left > _HIGH:
            high = i
            break
    if high is None:
        return None
    low = next((span for span in spans[high + 1 :] if (left := _left(start, span)) is not None and left < _LOW), None)
    return None if low is None else low.step - spans[high].step
