"""Counts the groups in a row of which a rater has rated no answer. Pure."""

from collections.abc import Sequence

from lachesis.pipeline.scoring.rater import Rating

__all__ = ["ABSTAINED", "UnratedGroups"]

ABSTAINED = "it abstained"
"""Why there is no rating where the rater chose to give none."""
_PATIENCE = 10
"""Times as many groups are waited for where a rater abstains, which may be right."""


class UnratedGroups:
    """The raters of one environment, by name: groups in a row without any rating, and why the newest had none."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        self._why: dict[str, str] = {}

    def count(self, rater: str, ratings: Sequence[Rating]) -> None:
        """Count one group's ratings of a rater. Groups that wait for one that is away say nothing."""
        if not ratings or any(rating.status == "unavailable" for rating in ratings):
            return
        if any(rating.status == "ok" for rating in ratings):
            self._in_a_row.pop(rater, None)
            return
        failed = next((rating for rating in ratings if rating.status not in {"ok", "abstain"}), None)
        self._in_a_row[rater] = self._in_a_row.get(rater, 0) + 1
        self._why[rater] = ABSTAINED if failed is None else f"{failed.status}, {failed.detail}".strip(", ")

    def without_rating(self, least: int) -> dict[str, str]:
        """Return by rater why `least` groups in a row, or more, have no rating of it, if that is so."""
        return {
            rater: f"no answer of its last {count} groups has a rating: {self._why[rater]}"
            for rater, count in self._in_a_row.items()
            if count >= (_PATIENCE * least if self._why[rater] == ABSTAINED else least)
        }

    def reasons(self) -> dict[str, str]:
        """Return by rater why no answer of its newest group has a rating; only those of which that is so."""
        return {rater: self._why[rater] for rater in self._in_a_row}
