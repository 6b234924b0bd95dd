"""Checks of shares: groups or samples that are broken, missing, truncated, alike, or at a bound."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, finite, graded

_USUAL_SAMPLES = 8
"""Samples of a group, from which on the thresholds for groups that are alike are meant as they stand."""

__all__ = ["FaultyGroupsCheck", "NonFiniteCheck", "SaturationCheck", "TruncationCheck", "ZeroVarianceCheck"]


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
    """Samples within 1 % of one and the same bound of the score: > .9 warns, > .98 halts. Nothing is left to learn, or
    the score has been hacked. Scores beyond the bounds are none of its business: the bounds are not theirs."""

    name = "saturation"

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

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
        severity, threshold = graded(shares[bound], [(0.9, "warn"), (0.98, "halt")])
        reason = "" if severity == "ok" else f"{shares[bound]:.0%} of the scores lie within 1 % of {bound:g}"
        examples = [score.group for score in window.scores[:MAX_EXAMPLES]] if severity != "ok" else []
        return CheckResult(severity, shares[bound], threshold, reason, examples)


def _alike(share: float, samples: int) -> float:
    """Return the share of groups of so many samples that are alike at the rate at which `share` of those of 8 are."""
    if not 0 < samples < _USUAL_SAMPLES:
        return share
    rare: float = 1 - share ** (1 / _USUAL_SAMPLES)
    alike: float = rare**samples + (1 - rare) ** samples
    return max(share, alike)


class ZeroVarianceCheck(Check):
    """Groups whose rewards do not differ, of those with rewards: > .6 warns, > .9 halts (generating is wasted).

    With success rate p and G samples their share is p^G + (1-p)^G, so small groups are alike more often by chance: two
    samples at least every other time. Below 8 samples the thresholds are the shares at those p at which 8 have .6 and
    .9.
    """

    name = "zero_variance"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        judged = [reward for reward in window.rewards if reward.verdict in {"trainable", "zero_variance"}]
        flat = [reward.group for reward in judged if reward.verdict == "zero_variance"]
        if not judged:
            return CheckResult("idle", reason="no rewards")
        share = len(flat) / len(judged)
        samples = round(sum(reward.n_valid for reward in judged) / len(judged))
        severity, threshold = graded(share, [(_alike(0.6, samples), "warn"), (_alike(0.9, samples), "halt")])
        reason = "" if severity == "ok" else f"in {share:.0%} of the groups all rewards are alike: nothing to learn"
        return CheckResult(severity, share, threshold, reason, flat[:MAX_EXAMPLES] if reason else ())


class TruncationCheck(Check):
    """Samples cut off at the token limit: > .2 warns, > .5 halts."""

    name = "truncated"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        reported = [(score, score.signals) for score in window.scores if score.signals is not None]
        samples = sum(len(score.scores) for score, _ in reported)
        if not samples:
            return CheckResult("idle", reason="no samples")
        share = sum(signals.truncated for _, signals in reported) / samples
        severity, threshold = graded(share, [(0.2, "warn"), (0.5, "halt")])
        if severity == "ok":
            return CheckResult(severity, share, threshold)
        worst = sorted(reported, key=lambda pair: -pair[1].truncated)[:MAX_EXAMPLES]
        reason = f"{share:.0%} of the samples are cut off; raise max_new_tokens, or look for answers without end"
        return CheckResult(severity, share, threshold, reason, [score.group for score, _ in worst])


class FaultyGroupsCheck(Check):
    """Warns of any group that was quarantined by itself, because of what its tokens look like.

    They are out already; more than a tenth of all, for as long as it takes a warning to grow, quarantines the env. A
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
        return CheckResult("warn", share, 0.0, reason, [reward.group for reward in bad[:MAX_EXAMPLES]], grows=grows)
