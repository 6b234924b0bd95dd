"""Checks that answers are not the same text again and again."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lachesis.pipeline.health.logic.check import (
    Check,
    CheckResult,
    HealthWindow,
    graded,
    mean,
)
from lachesis.schemas.values import convert_plain

__all__ = ["ModeCollapse"]

_LONG = 32
"""Tokens from which on two answers to one task do not come out alike by being right."""
_MIN_GROUPS = 8
"""Groups with two such answers, without which nothing is said of their share."""


class ModeCollapse(Check):
    """The same text again: the greater of two shares warns above .5 and quarantines above .9.

    Within groups: (n - distinct) / (n - 1) of answers of 32 tokens or more, where eight groups have two of them; short
    right answers are alike by being right, and those sampled at temperature 0 because they must. Between tasks: the
    share of samples whose text answers another task of the window as well; where that was above a quarter in the first
    window (yes or no), it is left out. Texts are compared by a CRC-32 of their tokens.

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
        within = [
            (len(long) - len(set(long))) / (len(long) - 1)
            for score, signals in reported
            if not signals.greedy
            and len(long := [text for text, n in zip(signals.texts, score.lengths, strict=True) if n >= _LONG]) > 1
        ]
        alike = fmean(within) if len(within) >= _MIN_GROUPS else 0.0
        again = max(alike, between if self._between_at_start <= 0.25 else 0.0)
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
