"""Checks for missing ratings: of a rater that is away, fails now and then, or fails by the answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

import msgspec

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, mean
from lachesis.pipeline.health.logic.paired_difference import PairedDifference
from lachesis.pipeline.health.logic.trends import slope_t
from lachesis.schemas.alerts import Severity
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["MissingRatingsCheck"]

_GROUPS_OF_OUTAGE = 8
"""Groups in a row in which a rater rates no sample, for one reason, from which on it counts as away."""
_MANY, _MOST = 0.10, 0.5
"""Shares of missing ratings: from the first on a person should know, from the second on at once."""
_SURE_ERRORS = 3
_RECENT_WINDOWS = 8
_TREND_WINDOWS = 32
_CLEAR_Z = 4.0
"""Standard errors that no window of a run is beyond by chance."""
_SCORE = "score"


class _OutageRun(msgspec.Struct):
    """Groups in a row in which a rater rated no sample, for the same `reason`; `text` says more of the first one."""

    reason: str
    text: str
    first: str
    since_ns: int
    groups: int = 0


class _Gap(msgspec.Struct):
    """What a window lacks of a rater: the share of its ratings, and by how much the score and the other raters' ratings
    of those samples differ from those of the other samples in the group."""

    share: float = 0.0
    score: PairedDifference = msgspec.field(default_factory=PairedDifference)
    others: PairedDifference = msgspec.field(default_factory=PairedDifference)


class MissingRatingsCheck(Check):
    """The share of a rater's ratings that are missing (timeout, error), of the worst rater, or of scores: > 10 %
    informs. It warns from 50 % on, or if the share is above 10 % by three standard errors in the window (over groups,
    since the ratings of a group are often missing together) and over the last eight windows (over windows, since a
    service that is overloaded fails in bursts). An abstention is an answer.

    Nothing is ever put in place of a missing rating, so fewer raters are left, and a policy may be paid for making a
    strict one fail. A share says nothing of that: a service fails as well. So any share > 10 % warns at once, and
    quarantines where it lasts, if within groups the samples without the rating score more (z > 4), and either the other
    raters rate them differently (|z| > 4), so that what fails depends on the answer, or their share keeps rising over
    32 windows (t > 4). Both are of the last eight windows. If half of the scores themselves are missing, it quarantines
    as well.

    A rater that rates no sample of 8 groups in a row or more, for one reason, is away or broken. The check reports that
    as its outage, with its error and since when, and it never quarantines, because the environment is not the cause.
    What an outage takes does not count towards the share.
    """

    name = "missing"

    def __init__(self) -> None:
        self._runs: dict[str, _OutageRun] = {}
        self._recent: deque[dict[str, _Gap]] = deque(maxlen=_TREND_WINDOWS)  # by rater, where something is missing

    def evaluate(self, window: HealthWindow) -> CheckResult:
        outages = self._outages(window)
        taken = {index for _, indexes in outages.values() for index in indexes}
        total, missing, examples = 0, dict[str, list[int]](), dict[str, list[str]]()
        lost: dict[str, _Gap] = {}
        for index, score in enumerate(window.scores):
            total += len(score.scores)
            columns = {name: _missing(column) for name, column in score.statuses.items()}
            for name in columns:
                if name in outages and index in outages[name][1]:
                    columns[name] = []
            columns[_SCORE] = [] if index in taken else [value is None for value in score.scores]
            for name, flags in columns.items():
                missing.setdefault(name, []).append(sum(flags))
                if any(flags):
                    examples.setdefault(name, []).append(score.group)
                    _compare(score, name, flags, lost.setdefault(name, _Gap()))
        if not total:
            return CheckResult("idle", reason="no scores")
        shares = {name: sum(counts) / total for name, counts in missing.items()}
        for name, one in lost.items():
            one.share = shares[name]
        self._recent.append(lost)
        many = [name for name, share in shares.items() if share > _MANY]
        if many:
            harm = {name: self._earned_by_it(name) for name in many}
            worst = max(many, key=lambda name: (harm[name] is not None, shares[name]))
            what = "scores are" if worst == _SCORE else f"ratings of {worst} are"
            reason = f"{shares[worst]:.0%} of the {what} missing; {harm[worst] or 'remove the rater or fix it'}"
            by_group = [*missing[worst], *[0] * (len(window.scores) - len(missing[worst]))]
            earned = harm[worst] is not None
            sure = self._is_sure(worst, shares[worst], by_group, total)
            severity: Severity = "warn" if earned or sure or shares[worst] > _MOST else "inform"
            stops = earned or (sure and shares[_SCORE] > _MOST)
            return CheckResult(
                severity, shares[worst], _MANY, reason, examples.get(worst, [])[:MAX_EXAMPLES], grows=stops
            )
        if not outages:
            return CheckResult("ok", max(shares.values()), _MANY)
        name = max(outages, key=lambda name: len(outages[name][1]))
        run, indexes = outages[name]
        groups = [window.scores[index].group for index in sorted(indexes)[:MAX_EXAMPLES]]
        away = sum(len(window.scores[index].scores) for index in indexes) / total
        return CheckResult("warn", away, _MANY, _describe_run(name, run, len(outages)), groups)

    def _is_sure(self, name: str, share: float, by_group: Sequence[int], total: int) -> bool:
        lately = [lost[name].share if name in lost else 0.0 for lost in list(self._recent)[-_RECENT_WINDOWS:]]
        return (
            share - _SURE_ERRORS * _error(by_group, total) > _MANY
            and fmean(lately) - _SURE_ERRORS * _error(lately, len(lately)) > _MANY
        )

    def _earned_by_it(self, name: str) -> str | None:
        """Return in words that answers which make the rater fail are paid for it, None if nothing says so."""
        recent = [lost[name] for lost in list(self._recent)[-_RECENT_WINDOWS:] if name in lost]
        score = sum((one.score for one in recent), PairedDifference())
        others = sum((one.others for one in recent), PairedDifference())
        if score.z <= _CLEAR_Z:
            return None
        paid = f"samples without it score more within groups by {score.mean:.2f} (z = {score.z:.1f})"
        if abs(others.z) > _CLEAR_Z:
            return f"{paid}, and the other raters give them {others.mean:+.2f}: answers may make it fail"
        trend = slope_t([lost[name].share if name in lost else 0.0 for lost in self._recent])
        if trend is not None and trend > _CLEAR_Z:
            return f"{paid}, and they become more and more: answers may make it fail"
        return None

    def _outages(self, window: HealthWindow) -> dict[str, tuple[_OutageRun, set[int]]]:
        """Follow the runs of every rater; return those long enough, with the places of their groups in the window."""
        found: dict[str, tuple[_OutageRun, set[int]]] = {}
        here: dict[str, set[int]] = {}
        for index, score in enumerate(window.scores):
            for name in {*self._runs, *score.statuses}:
                reason = _reason(score, name)
                run = self._runs.get(name)
                if reason is None:
                    self._runs.pop(name, None)
                    here.pop(name, None)
                    continue
                if run is None or run.reason != reason:
                    text = score.failures.get(name, reason)
                    since_ns = score.stamps[-1].start_ns if score.stamps else 0
                    run = self._runs[name] = _OutageRun(reason, text, score.group, since_ns)
                    here[name] = set()
                run.groups += 1
                here.setdefault(name, set()).add(index)
                if run.groups >= _GROUPS_OF_OUTAGE:
                    earlier = found.get(name, (run, set()))[1]
                    found[name] = (run, earlier | here[name])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"runs": msgspec.to_builtins(self._runs), "recent": msgspec.to_builtins(list(self._recent))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._runs = convert_plain("health state of missing ratings", dict[str, _OutageRun], state.get("runs", {}))
        self._recent.extend(convert_plain("health state", list[dict[str, _Gap]], state.get("recent", [])))


def _compare(score: GroupScore, name: str, flags: Sequence[bool], lost: _Gap) -> None:
    """Take in by how much score and other ratings of the samples without a rating of `name` differ from the rest."""
    if name == _SCORE:
        return
    others = [column for rater, column in score.ratings.items() if rater != name]
    for values, found in (
        (score.scores, lost.score),
        ([mean(c[i] for c in others) for i in range(len(flags))], lost.others),
    ):
        without = mean(value for value, flag in zip(values, flags, strict=True) if flag)
        with_it = mean(value for value, flag in zip(values, flags, strict=True) if not flag)
        if without is not None and with_it is not None:
            found.add(without - with_it)


def _error(values: Sequence[float], total: int) -> float:
    """Return the standard error of sum / total over groups or windows."""
    return stdev(values) * math.sqrt(len(values)) / total if len(values) > 1 else 0.0


def _missing(column: list[str]) -> list[bool]:
    return [status not in {"ok", "abstain"} for status in column]


def _reason(score: GroupScore, name: str) -> str | None:
    """Return why the rater rated no sample of the group, None if it rated one: the status and the kind of error."""
    column = score.statuses.get(name)
    if column is None or not column or not all(_missing(column)):
        return None
    return f"{column[0]} {score.failures.get(name, '').partition(':')[0]}".strip()


def _describe_run(name: str, run: _OutageRun, outages: int) -> str:
    since = f"since {datetime.fromtimestamp(run.since_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC" if run.since_ns else ""
    more = f"; and {outages - 1} more raters" if outages > 1 else ""
    return (
        f"rater {name} is unavailable or broken; the environment is not the cause: {run.text[:200]}; it rated nothing "
        f"in {run.groups} groups in a row {since}, from {run.first} on{more}"
    )
