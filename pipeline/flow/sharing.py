"""How runs that share a server's streams divide what is left of them. Pure.

What goes in: the record of all reservations, what the streams held at a time *after* it was read, and what this run has
promised and wants. What comes out: the record to write in its place, if nobody else wrote meanwhile. Guarantees that
whoever follows that order never brings what is stored and what all runs may promise above the closing share of a
stream: what others store is within their reservations, and these only shrink by what the figures already contain. What
a run has promised stays reserved in any case, even above that share; then it merely gets no more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.schemas.errors import FencedError
from lachesis.schemas.retention import Reservation, Reservations

__all__ = ["Demand", "Share", "reserve", "share_of"]


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes by stream: what a run has promised, and the most that it refused for want of a reservation since."""

    promised: Mapping[str, int]
    wanted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes by stream: what a run may promise, and what others may. `names` tells who they are."""

    own: Mapping[str, int]
    others: Mapping[str, int]
    names: tuple[str, ...] = ()


def reserve(
    old: Reservations,
    run: str,
    term: str,
    demand: Demand,
    usage: Mapping[str, StreamUsage],
    *,
    now_ns: int,
    lasts_s: float,
    close_at: float,
    keeps: bool,
    takes_over: bool,
) -> Reservations:
    """Return `old` with a reservation of `run` that fits; the very same if it still does.

    `keeps`: give nothing back yet, since leases of an earlier life may be held. `takes_over`: the reservation of an
    earlier governor becomes this one's; otherwise `FencedError` is raised when it is another's. Reservations that have
    expired are dropped: `now_ns` is the server's time, asked after `old` was read.
    """
    mine = old.runs.get(run)
    if mine is not None and mine.term != term and not takes_over:
        raise FencedError(f"governor {mine.term} has taken over run {run}")
    others = {
        name: reservation for name, reservation in old.runs.items() if name != run and reservation.expires_ns > now_ns
    }
    sizes, wants = {}, {}
    for stream, promised in demand.promised.items():
        held = mine.bytes.get(stream, 0) if mine else 0
        least, wanted = max(promised, held) if keeps else promised, demand.wanted.get(stream, 0)
        left = _left(stream, usage, others, close_at) - least
        asked = sum(other.wants.get(stream, 0) for other in others.values())
        sizes[stream] = least + _beyond(left, wanted, asked, held - least)
        if wanted > sizes[stream] - least:
            wants[stream] = wanted
    lasts_ns = int(lasts_s * 1e9)
    renewed = Reservation(term=term, expires_ns=now_ns + lasts_ns, bytes=sizes, wants=wants)
    is_fresh = mine is not None and mine.expires_ns - now_ns > lasts_ns * 3 // 4
    if is_fresh and old.runs == {**others, run: msgspec.structs.replace(renewed, expires_ns=old.runs[run].expires_ns)}:
        return old
    return old.replace(runs={**others, run: renewed})


def _left(stream: str, usage: Mapping[str, StreamUsage], others: Mapping[str, Reservation], close_at: float) -> int:
    figures = usage.get(stream)
    if figures is None or figures.max_bytes <= 0:
        return 0
    reserved = sum(other.bytes.get(stream, 0) for other in others.values())
    return int(close_at * figures.max_bytes) - figures.bytes - reserved


def _beyond(left: int, wanted: int, asked: int, now: int) -> int:
    """Return how much of `left` to reserve beyond what is promised: `wanted` if it fits, and half of what is over then.

    Others have `asked` for some of that. `now` is reserved already; it stays if it is about right, for fewer writes.
    """
    if left <= 0 or wanted > left:
        return 0
    spare = max(0, left - wanted - asked)
    most, fitting = wanted + spare, wanted + spare // 2
    return now if wanted + spare // 4 <= now <= most else fitting


def share_of(record: Reservations, run: str) -> Share:
    """Return what `record` says to `run`."""
    mine = record.runs.get(run)
    others: dict[str, int] = {}
    for name, reservation in record.runs.items():
        if name != run:
            for stream, size in reservation.bytes.items():
                others[stream] = others.get(stream, 0) + size
    return Share(dict(mine.bytes) if mine else {}, others, tuple(sorted(record.runs.keys() - {run})))
