"""Counts answers that a rater fails on: whole groups in a row, and a share of the newest. Pure."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from lachesis.pipeline.common.secret_texts import without_secrets
from lachesis.pipeline.scorer.rater import Rating

__all__ = ["ABSTAINED", "UnratedGroups"]

ABSTAINED = "it abstained"
"""Why there is no rating where the rater chose to give none."""
_NO_FAILURE = frozenset({"ok", "abstain"})
_PATIENCE = 10
"""Times as many groups are waited for where a rater abstains, which may be right."""
_RECENT_GROUPS = 64
_MIN_ANSWERS = 16
_MANY = 0.2
"""Share of the newest answers on which a rater that fails is named: fewer may be the answers' own doing."""


class _Group(NamedTuple):
    answers: int
    failed: int
    example: str
    """Which answer failed first, and why."""


class UnratedGroups:
    """The raters of one environment, by name: groups in a row without any rating, and why the newest had none; and the
    newest groups, with how many answers each failed on."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._why: dict[str, str] = {}
        self._recent: dict[str, deque[_Group]] = {}

    def count(self, rater: str, ratings: Sequence[Rating], item: str = "") -> None:
        """Count one group's ratings of a rater. Groups that wait for an unavailable rater are not counted."""
        statuses = [rating.status for rating in ratings]
        if not ratings or "unavailable" in statuses:
            return
        failed = [i for i, status in enumerate(statuses) if status not in _NO_FAILURE]
        why = _reason(ratings[failed[0]]) if failed else ABSTAINED
        example = f"sample {failed[0]} of item {item[:80]!r}: {why}" if failed else ""
        recent = self._recent.setdefault(rater, deque(maxlen=_RECENT_GROUPS))
        recent.append(_Group(len(ratings), len(failed), example))
        if "ok" in statuses:
            self._in_a_row.pop(rater, None)
            return
        self._in_a_row[rater] = self._in_a_row.get(rater, 0) + 1
        self._why[rater] = why

    def without_rating(self, least: int) -> dict[str, str]:
        """Return by rater why `least` groups in a row, or more, have no rating of it, if that is so."""
        return {
            rater: f"no answer of its last {count} groups has a rating: {self._why[rater]}"
            for rater, count in self._in_a_row.items()
            if count >= (_PATIENCE * least if self._why[rater] == ABSTAINED else least)
        }

    def failing(self) -> dict[str, str]:
        """Return by rater the answers that it failed on, if they are a large share of the newest but not all."""
        found = {}
        for rater, recent in self._recent.items():
            answers, failed = sum(group.answers for group in recent), sum(group.failed for group in recent)
            if answers >= _MIN_ANSWERS and failed >= _MANY * answers:
                example = next(group.example for group in reversed(recent) if group.example)
                share = f"{failed} of the newest {answers} answers ({failed / answers:.0%})"
                found[rater] = f"it failed on {share}, for one on {example}"
        return found

    def reasons(self) -> dict[str, str]:
        """Return why no answer of a rater's newest group has a rating, for raters where that holds."""
        return {rater: self._why[rater] for rater in self._in_a_row}


def _reason(rating: Rating) -> str:
    return without_secrets(f"{rating.status}, {rating.detail}".strip(", "))
