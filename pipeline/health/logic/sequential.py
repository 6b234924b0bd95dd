"""Sequential checks of change: have the mean scores of groups stepped, or crept, away?

A group's mean score counts by its rank among all since the last alarm, itself included. While nothing changes every
rank is as likely as every other, so the time between false alarms is that of normal values, whatever the unit and the
distribution of the scores are: heavy tails, rare successes and groups of two as well. Groups are taken to be
independent, samples of one group are not. Both checks begin after 80 groups.

Measured on stationary scores (normal, Student's t, lognormal, success rates of .01 to .97, groups of 2 to 16): a false
alarm in 9,000 to 50,000 blocks of 16 groups, one in 19,000 on average. See pipeline/health/README.md.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Any, ClassVar

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow
from lachesis.pipeline.health.logic.drift import BLOCK

__all__ = ["REFERENCE_GROUPS", "SlowDrift", "StepChange"]

REFERENCE_GROUPS = 64
"""Groups that ranks are first taken among: the first block after them is checked."""
_EDGES = 16
"""Order statistics of the first groups that split the line into cells. An edge is a cell of its own."""
_MAX_DEVIATIONS = 2.5
"""A block counts for no more: where successes are rare, the mean rank of one by chance is far out."""


class _RankScale:
    """Standardised ranks of values among all before them. Ties share their mean rank, and count to the deviation."""

    def __init__(self, first: list[float], edges: list[float], counts: list[int]) -> None:
        self.first, self.edges, self.counts = first, edges, counts
        self._groups = sum(counts)
        self._cubes = sum(count**3 for count in counts)

    def rank(self, value: float) -> float | None:
        """Take in a value and return its rank as a standard deviate; None while the first values are gathered."""
        if not self.edges:
            self.first.append(value)
            if len(self.first) == REFERENCE_GROUPS:
                self._split()
            return None
        cell = self._count(value)
        count, n = self.counts[cell], self._groups
        above_middle = sum(self.counts[:cell]) + (count - n) / 2
        spread = n**3 - self._cubes  # 12 n times the variance of n ranks with these ties
        return above_middle * math.sqrt(12 * n / spread) if spread else 0.0

    def _split(self) -> None:
        ranked = sorted(self.first)
        self.edges = sorted({ranked[round(i * (REFERENCE_GROUPS - 1) / (_EDGES - 1))] for i in range(_EDGES)})
        self.counts = [0] * (2 * len(self.edges) + 1)
        for value in self.first:
            self._count(value)
        self.first = []

    def _count(self, value: float) -> int:
        """Count a value, and return its cell."""
        cell = bisect_left(self.edges, value) + bisect_right(self.edges, value)
        count = self.counts[cell]
        self.counts[cell] = count + 1
        self._groups += 1
        self._cubes += (count + 1) ** 3 - count**3
        return cell


class _Sequential(Check):
    """A two-sided CUSUM (Page 1954) of blocks of ranks: S = max(0, S +- z - slack), an alarm above `limit`."""

    slack: ClassVar[float]
    limit: ClassVar[float]
    verb: ClassVar[str]

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._scale = _RankScale([], [], [])
        self._block: list[float] = []
        self._up = self._down = 0.0
        self._judged = False

    def evaluate(self, window: HealthWindow) -> CheckResult:
        values = window.means()
        if not values:
            return CheckResult("idle", reason="no scores")
        alarm: CheckResult | None = None
        for value in values:
            if self._moved(value):
                reason = f"scores {self.verb} {'up' if self._up > self._down else 'down'}"
                alarm = CheckResult("inform", max(self._up, self._down), self.limit, reason, window.newest)
                self._begin()  # what comes after is compared with what it is like now
        if alarm is not None:
            return alarm
        if not self._judged:
            return CheckResult("idle", reason=f"fewer than {REFERENCE_GROUPS + BLOCK} groups yet")
        return CheckResult("ok", max(self._up, self._down), self.limit)

    def _moved(self, value: float) -> bool:
        """Take in a group's mean score. Return whether it completes a block that raises the alarm."""
        rank = self._scale.rank(value)
        if rank is None:
            return False
        self._block.append(rank)
        if len(self._block) < BLOCK:
            return False
        z = math.fsum(self._block) / math.sqrt(BLOCK)
        z = max(-_MAX_DEVIATIONS, min(_MAX_DEVIATIONS, z))
        self._block, self._judged = [], True
        self._up, self._down = max(0.0, self._up + z - self.slack), max(0.0, self._down - z - self.slack)
        return max(self._up, self._down) > self.limit

    def state_dict(self) -> dict[str, Any]:
        scale = self._scale
        return {
            "first": scale.first,
            "edges": scale.edges,
            "counts": scale.counts,
            "block": self._block,
            "sums": [self._up, self._down],
            "judged": self._judged,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo `state_dict`. A state of the time when block means were compared with the first ones starts over."""
        if "counts" not in state:
            return
        first, edges, block = ([float(value) for value in state[name]] for name in ("first", "edges", "block"))
        self._scale = _RankScale(first, edges, [int(count) for count in state["counts"]])
        self._block, self._judged = block, bool(state["judged"])
        self._up, self._down = (float(value) for value in state["sums"])


class StepChange(_Sequential):
    """A step of the mean score: slack .5, limit 8.5. It informs, because learning makes steps: about 20 blocks after a
    step of one deviation of a block that 100 usual blocks came before, and within 8 blocks of a step of two."""

    name = "step_change"
    slack, limit, verb = 0.5, 8.5, "stepped"


class SlowDrift(_Sequential):
    """A mean score that creeps: slack .1, limit 30. It informs, because learning is such a drift: about 40 to 70 blocks
    after one of .02 deviations a block began."""

    name = "slow_drift"
    slack, limit, verb = 0.1, 30.0, "drift"
