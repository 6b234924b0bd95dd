"""Checks of shares: groups or samples that are broken, missing, truncated, alike, or at a bound."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from lachesis.pipeline.health.logic.check import (
    MAX_EXAMPLES,
    START_WINDOWS,
    Check,
    CheckResult,
    HealthWindow,
    finite,
    graded,
    mean,
)
from lachesis.schemas.alerts import Severity

_USUAL_SAMPLES = 8
"""Samples of a group, from which on the thresholds for groups that are alike are meant as they stand."""

__all__ = ["FaultyGroupsCheck", "NonFiniteCheck", "SaturationCheck", "TruncationCheck", "ZeroVarianceCheck"]


class _Start:
    """The mean of a share in the first two windows of a run: what the task is like, before anything is learned."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def compare(self, share: float) -> float:
        """Take in the share of a window, and return by how much it lies above the start."""
        if len(self.shares) < START_WINDOWS:
            self.shares.append(share)
        return share - sum(self.shares) / len(self.shares)


class NonFiniteCheck(Check):
    """A rating that is NaN or infinite, a score beyond +-1e12, or a group that cannot be read: its group is out already
    (status, dead letter).

    Any warns; more than 1 % of the last eight windows, and at least three groups, halts.
    """

    name = "nonfinite"

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=8)  # (faulty, all) by window

    def evaluate(self, window: HealthWindow) -> CheckResult:
        if not window.groups:
            return CheckResult("idle", reason="no groups")
        bad = [
            score.group
            for score in window.scores
            if any("nonfinite" in column for column in score.statuses.values())
            or len(list(finite(score.scores))) < sum(value is not None for value in score.scores)
        ]
        bad += window.dead
        self._recent.append((len(bad), window.groups))
        faulty, groups = (sum(column) for column in zip(*self._recent, strict=True))
        if faulty >= 3 and faulty > 0.01 * groups:
            reason = (
                f"{faulty} of the last {groups} groups hold NaN, infinity or a score beyond 1e12, or cannot be read"
            )
            return CheckResult("halt", faulty / groups, 0.01, reason, bad[:MAX_EXAMPLES])
        if bad:
            reason = f"{len(bad)} groups hold NaN, infinity or a score beyond 1e12, or cannot be read"
            return CheckResult("warn", faulty / groups, 0.0, reason, bad[:MAX_EXAMPLES], grows=True)
        return CheckResult("ok", faulty / groups, 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent.extend((int(bad), int(groups)) for bad, groups in state["recent"])


class SaturationCheck(Check):
    """Samples within 1 % of one and the same bound of the score: > .9 informs, > .98 halts. Nothing is left to learn,
    or the score has been hacked. Without a halt, > .98 warns if it is more by .1 than in the first two windows; a task
    at which hardly anything succeeds is at the bound from the start. Scores beyond the bounds are none of its business:
    the bounds are not theirs."""

    name = "saturation"

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high
        self._start = _Start()

    def evaluate(self, window: HealthWindow) -> CheckResult:
        values = [value for score in window.scores for value in finite(score.scores)]
        if not values:
            return CheckResult("idle", reason="no scores")
        margin = 0.01 * (self.high - self.low)
        shares = {
            bound: sum(abs(value - bound) <= margin for value in values) / len(values)
            for bound in (self.low, self.high)
        }
        bound = max(shares, key=lambda bound: shares[bound])
        severity, threshold = graded(shares[bound], [(0.9, "inform"), (0.98, "halt")])
        risen = self._start.compare(shares[bound]) > 0.1
        reason = "" if severity == "ok" else f"{shares[bound]:.0%} of the scores lie within 1 % of {bound:g}"
        examples = [score.group for score in window.scores[:MAX_EXAMPLES]] if severity != "ok" else []
        return CheckResult(severity, shares[bound], threshold, reason, examples, unhalted="warn" if risen else "inform")

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start.shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start.shares = [float(share) for share in state.get("start", [])]


def _alike(share: float, samples: int) -> float:
    """Return the share of groups of so many samples that are alike at the rate at which `share` of those of 8 are."""
    if not 0 < samples < _USUAL_SAMPLES:
        return share
    rare: float = 1 - share ** (1 / _USUAL_SAMPLES)
    alike: float = rare**samples + (1 - rare) ** samples
    return max(share, alike)


class ZeroVarianceCheck(Check):
    """Groups whose rewards do not differ, of those with rewards: > .6 informs, > .9 halts (generating is wasted).
    Without a halt, > .9 warns if it is more by .3 than in the first two windows: a task at which hardly anything
    succeeds has such groups from the start.

    With success rate p and G samples their share is p^G + (1-p)^G, so small groups are alike more often by chance: two
    samples at least every other time. Below 8 samples the thresholds are the shares at those p at which 8 have .6 and
    .9.
    """

    name = "zero_variance"

    def __init__(self) -> None:
        self._start = _Start()

    def evaluate(self, window: HealthWindow) -> CheckResult:
        judged = [reward for reward in window.rewards if reward.verdict in {"trainable", "zero_variance"}]
        flat = [reward.group for reward in judged if reward.verdict == "zero_variance"]
        if not judged:
            return CheckResult("idle", reason="no rewards")
        share = len(flat) / len(judged)
        samples = round(sum(reward.n_valid for reward in judged) / len(judged))
        severity, threshold = graded(share, [(_alike(0.6, samples), "inform"), (_alike(0.9, samples), "halt")])
        risen = self._start.compare(share) > 0.3
        reason = "" if severity == "ok" else f"in {share:.0%} of the groups all rewards are alike: nothing to learn"
        examples = flat[:MAX_EXAMPLES] if reason else ()
        return CheckResult(severity, share, threshold, reason, examples, unhalted="warn" if risen else "inform")

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start.shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start.shares = [float(share) for share in state.get("start", [])]


class TruncationCheck(Check):
    """Samples cut off at the token limit: > .2 informs, > .5 halts. Without a halt, > .5 warns, and so does > .2 that
    is more by .2 than in the first two windows: answers come to be without end. Over .5 and more by .4, where the mean
    score is not below that of the first two windows, answers without end are paid for: a warning that lasts then
    quarantines."""

    name = "truncated"

    def __init__(self) -> None:
        self._start = _Start()
        self._start_score = _Start()

    def evaluate(self, window: HealthWindow) -> CheckResult:
        reported = [(score, score.signals) for score in window.scores if score.signals is not None]
        samples = sum(len(score.scores) for score, _ in reported)
        if not samples:
            return CheckResult("idle", reason="no samples")
        share = sum(signals.truncated for _, signals in reported) / samples
        severity, threshold = graded(share, [(0.2, "inform"), (0.5, "halt")])
        rise, score = self._start.compare(share), mean(window.means())
        gain = 0.0 if score is None else self._start_score.compare(score)
        if severity == "ok":
            return CheckResult(severity, share, threshold)
        if severity == "inform" and rise > 0.2:
            severity = "warn"
        worst = sorted(reported, key=lambda pair: -pair[1].truncated)[:MAX_EXAMPLES]
        reason = f"{share:.0%} of the samples are cut off; raise max_new_tokens, or look for answers without end"
        paid = share > 0.5 and rise > 0.4 and gain >= 0
        return CheckResult(severity, share, threshold, reason, [score.group for score, _ in worst], grows=paid)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start.shares, "score": self._start_score.shares}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start.shares = [float(share) for share in state.get("start", [])]
        self._start_score.shares = [float(score) for score in state.get("score", [])]


class FaultyGroupsCheck(Check):
    """Informs of any group that was quarantined by itself, because of what its tokens look like.

    They are out already; more than a tenth of all warns, and quarantines the environment if that lasts. A
    group that the trainer cannot use never does: it may be imported, and says nothing of what the env generates.
    """

    name = "faulty_groups"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        if not window.rewards:
            return CheckResult("idle", reason="no rewards")
        bad = [reward for reward in window.rewards if reward.verdict == "quarantined"]
        share = len(bad) / len(window.rewards)
        if not bad:
            return CheckResult("ok", share, 0.0)
        reason = f"{len(bad)} groups quarantined, the first for: {(bad[0].reason or '?')[:200]}"
        unusable = {score.group for score in window.scores if score.signals and score.signals.untrainable}
        faulty = sum(reward.group not in unusable for reward in bad)
        grows = faulty > 0.1 * len(window.rewards)
        severity: Severity = "warn" if grows else "inform"
        return CheckResult(severity, share, 0.0, reason, [reward.group for reward in bad[:MAX_EXAMPLES]], grows=grows)
