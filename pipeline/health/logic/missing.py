"""Checks for missing ratings. Distinguishes an unavailable rater from an unscorable environment."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

import msgspec

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, graded
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import shaped

__all__ = ["MissingRatingsCheck"]

_GROUPS_OF_OUTAGE = 8
"""Groups in a row in which a rater rates no sample, for one reason, from which on it counts as away."""
_SURE_ERRORS = 3
_RECENT_WINDOWS = 8
_SCORE = "score"


class _OutageRun(msgspec.Struct):
    """Groups in a row in which a rater rated no sample, for the same `reason`; `text` says more of the first one."""

    reason: str
    text: str
    first: str
    since_ns: int
    groups: int = 0


class MissingRatingsCheck(Check):
    """The share of a rater's ratings that are missing (timeout, error), of the worst rater, or of scores: > 10 % warns.

    An abstention is an answer. Nothing is ever put in place of a missing rating, so fewer raters are left. If
    that lasts, and the share is above 10 % by three standard errors, it quarantines the environment. That must
    hold of the window, with the error over groups, since the ratings of a group are often missing together; and of the
    last eight windows, with the error over windows, since a service that is overloaded fails in bursts. If nothing was
    missing before, that takes about six windows, and three at the start of a run.

    A rater that rates no sample of 8 groups in a row or more, for one reason, is away or broken. The check reports that
    as its outage, with its error and since when, and it never quarantines, because the environment is not the cause.
    What an outage takes does not count towards the share.
    """

    name = "missing"

    def __init__(self) -> None:
        self._runs: dict[str, _OutageRun] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT_WINDOWS)  # shares missing by rater

    def evaluate(self, window: HealthWindow) -> CheckResult:
        outages = self._outages(window)
        taken = {index for _, indexes in outages.values() for index in indexes}
        total, missing, examples = 0, dict[str, list[int]](), dict[str, list[str]]()
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
        if not total:
            return CheckResult("idle", reason="no scores")
        worst = max(missing, key=lambda name: sum(missing[name]))
        share = sum(missing[worst]) / total
        self._recent.append({name: sum(lost) / total for name, lost in missing.items() if any(lost)})
        severity, threshold = graded(share, [(0.10, "warn")])
        if severity != "ok":
            what = "scores are" if worst == _SCORE else f"ratings of {worst} are"
            reason = f"{share:.0%} of the {what} missing; remove the rater or fix it"
            by_group = [*missing[worst], *[0] * (len(window.scores) - len(missing[worst]))]
            lately = [shares.get(worst, 0.0) for shares in self._recent]
            sure = (
                share - _SURE_ERRORS * _error(by_group, total) > threshold
                and fmean(lately) - _SURE_ERRORS * _error(lately, len(lately)) > threshold
            )
            return CheckResult(severity, share, threshold, reason, examples.get(worst, [])[:MAX_EXAMPLES], grows=sure)
        if not outages:
            return CheckResult(severity, share, threshold)
        name = max(outages, key=lambda name: len(outages[name][1]))
        run, indexes = outages[name]
        groups = [window.scores[index].group for index in sorted(indexes)[:MAX_EXAMPLES]]
        lost = sum(len(window.scores[index].scores) for index in indexes) / total
        return CheckResult("warn", lost, threshold, _describe_run(name, run, len(outages)), groups)

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
        return {"runs": msgspec.to_builtins(self._runs), "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._runs = shaped("health state of missing ratings", dict[str, _OutageRun], state.get("runs", {}))
        self._recent.extend(shaped("health state", list[dict[str, float]], state.get("recent", [])))


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
        "in "
        f"{run.groups} groups in a row {since}, from {run.first} on{more}"
    )
