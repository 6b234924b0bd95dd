"""Finds out which notices begin and which end, and keeps the notices of a run. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from lachesis.schemas.notices import Notice

__all__ = ["NoticeChanges", "NoticeHistory", "PastNotice"]

_GONE_S = 5.0
"""Seconds of absence after which a notice is over; one that comes back sooner counts as uninterrupted."""
_MAX_PAST = 200


class PastNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice of an earlier time, and when it was over, Unix ns; None: it held to the end of the run."""

    notice: Notice
    until_ns: int | None = None


class _Change(NamedTuple):
    begun: list[Notice]
    ended: list[Notice]


@dataclass(slots=True)
class _Open:
    notice: Notice
    seen_s: float


class NoticeChanges:
    """The notices that were reported as open."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], _Open] = {}

    @property
    def open(self) -> list[Notice]:
        """The open notices, in their last form."""
        return [one.notice for one in self._open.values()]

    def update(self, notices: Iterable[Notice], now_s: float) -> _Change:
        """Compare with the notices that hold at `now_s`; return those that began, and those that are over."""
        begun = []
        for notice in notices:
            key = notice.source, notice.key
            if key not in self._open:
                begun.append(notice)
            self._open[key] = _Open(notice, now_s)
        over = [key for key, one in self._open.items() if now_s - one.seen_s >= _GONE_S]
        return _Change(begun, [self._open.pop(key).notice for key in over])


class NoticeHistory:
    """The notices of a run, including those that are over; if there are too many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._past: list[PastNotice] = []
        self._open: list[Notice] = []

    def record(self, still_open: Sequence[Notice], ended: Iterable[Notice], now_ns: int) -> None:
        """Record the notices that hold now, and those that are over."""
        self._open = list(still_open)
        self._past += [PastNotice(notice=one, until_ns=now_ns) for one in ended]
        del self._past[:-_MAX_PAST]

    def all(self) -> list[PastNotice]:
        """Return the notices, those that still hold last."""
        return [*self._past, *(PastNotice(notice=one) for one in self._open)]
