"""Checks that the policy does not become surer and surer without becoming better."""

import math
from collections.abc import Mapping
from statistics import stdev
from typing import Any

from lachesis.pipeline.health.logic.check import (
    START_WINDOWS,
    Check,
    CheckResult,
    HealthWindow,
    graded,
    mean,
)
from lachesis.schemas.values import convert_plain

__all__ = ["Entropy"]


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
