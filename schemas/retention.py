"""Records how far a run's history may have been trimmed, and which holds keep the rest.

It is one key, changed only by compare-and-set. So a hold and a trim can never miss each other: the second writer sees
the first.
"""

from collections.abc import Iterable, Mapping

import msgspec

from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.subjects import BLOB_KINDS
from lachesis.schemas.values import Seq

__all__ = ["Hold", "LostRange", "Retention"]

_MAX_ORPHAN_RANGES = 1024
"""Ranges of one stream that the record lists: some 24 KiB."""


class LostRange(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of a stream, `first` to `last`.

    Of `lost`: whose messages the server lost, as `lachesis runs recover` noted. None of them is used again. Some of
    the messages may be there, stored after the loss.
    """

    first: Seq
    last: Seq


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody reads history: nothing at or above `needs` (sequence by stream) goes before `expires_ns` (Unix time).

    `about` says who it is, for people. A hold that `yields` is dropped rather than that the run waits for room.
    """

    needs: dict[str, int]
    expires_ns: int
    about: str
    yields: bool = False


class Retention(Event, frozen=True, kw_only=True):
    """`trimmed`: by stream, the sequence below which messages of the run may be gone. It never falls.

    `term` names the governor that trims; `holds` are by the name of who holds. `lost`: what the server lost, by stream.
    `orphans`: sequences that were deleted because they held chunks of large messages that no list names, by stream.
    `swept`: streams in which more sequences may have been deleted that way than are listed. `left_out`: commits and
    snapshots that their stage cannot use, by stream: `lachesis runs recover` noted them, and they are passed over.
    """

    run: str
    term: str = ""
    trimmed: dict[str, int] = {}
    holds: dict[str, Hold] = {}
    lost: dict[str, list[LostRange]] = {}
    swept: list[str] = []
    orphans: dict[str, list[LostRange]] = {}
    left_out: dict[str, list[Seq]] = {}

    def is_lost(self, stream: str, seq: int) -> bool:
        """Whether what was stored at `seq` of a stream is known to be lost."""
        return any(one.first <= seq <= one.last for one in self.lost.get(stream, ()))

    def unexplained(self, stream: str, first: int, last: int) -> list[tuple[int, int]]:
        """Return the ranges within `first` to `last` of which nothing says why a message would be gone."""
        seq, found = max(first, self.trimmed.get(stream, 1)), []
        for one in sorted([*self.lost.get(stream, ()), *self.orphans.get(stream, ())], key=lambda one: one.first):
            if one.first > last:
                break
            if seq < one.first:
                found.append((seq, one.first - 1))
            seq = max(seq, one.last + 1)
        return [*found, (seq, last)] if seq <= last else found

    def with_orphans(self, stream: str, seqs: Iterable[int]) -> "Retention":
        """Return the record that lists `seqs` too; of very many it says that they are not listed."""
        below = self.trimmed.get(stream, 1)
        listed = [*self.orphans.get(stream, ()), *(LostRange(seq, seq) for seq in seqs)]
        ranges = _joined(one for one in listed if one.last >= below)
        if len(ranges) > _MAX_ORPHAN_RANGES:
            return self.replace(swept=sorted({*self.swept, stream}), orphans={**self.orphans, stream: []})
        return self.replace(orphans={**self.orphans, stream: ranges})

    def with_lists_of(self, other: "Retention") -> "Retention":
        """Return the record with all that `other` lists as lost, trimmed, left out or deleted as orphans.

        Records that list the same are equal then but for term and holds, which are those of this one.
        """
        trimmed = {
            stream: max(self.trimmed.get(stream, 1), other.trimmed.get(stream, 1))
            for stream in {**self.trimmed, **other.trimmed}
        }
        swept = sorted({*self.swept, *other.swept})
        orphans = {
            stream: [one for one in ranges if one.last >= trimmed.get(stream, 1)]
            for stream, ranges in _united(self.orphans, other.orphans).items()
            if stream not in swept
        }
        return self.replace(
            trimmed=trimmed,
            lost=_united(self.lost, other.lost),
            orphans={stream: ranges for stream, ranges in orphans.items() if ranges},
            swept=swept,
            left_out={
                stream: sorted({*self.left_out.get(stream, ()), *other.left_out.get(stream, ())})
                for stream in {**self.left_out, **other.left_out}
            },
        )

    def standing(self, now_ns: int) -> dict[str, Hold]:
        """Return the holds that have not lapsed at `now_ns`, the server's time."""
        return {name: hold for name, hold in self.holds.items() if hold.expires_ns > now_ns}

    def check(self) -> None:
        sequences = [*self.trimmed.values(), *(seq for hold in self.holds.values() for seq in hold.needs.values())]
        if any(seq < 0 for seq in sequences):
            raise SchemaError("trimmed, holds: a sequence must not be negative")
        if others := sorted({*self.orphans, *self.swept} - {*BLOB_KINDS.values()}):
            raise SchemaError(f"orphans, swept: {others[0]!r:.40} is no stream with chunks of large messages")


def _united(one: Mapping[str, list[LostRange]], other: Mapping[str, list[LostRange]]) -> dict[str, list[LostRange]]:
    return {stream: _joined([*one.get(stream, ()), *other.get(stream, ())]) for stream in {**one, **other}}


def _joined(ranges: Iterable[LostRange]) -> list[LostRange]:
    """Return the ranges in order, those that overlap or follow one another as one."""
    found: list[LostRange] = []
    for one in sorted(ranges, key=lambda one: one.first):
        if found and one.first <= found[-1].last + 1:
            found[-1] = LostRange(found[-1].first, max(found[-1].last, one.last))
        else:
            found.append(one)
    return found
