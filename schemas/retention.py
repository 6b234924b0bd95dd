"""The record of a run's history: how far it may have been trimmed, and who holds what back from that.

One key, changed by compare-and-set alone. So a hold and a trim can never miss each other: the first writer is seen by
the second.
"""

import msgspec

from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Seq

__all__ = ["Hold", "LostRange", "Retention"]


class LostRange(msgspec.Struct, frozen=True, array_like=True):
    """Sequences of a stream, `first` to `last`, whose messages the server lost: `lachesis runs recover` noted it.

    None of them is used again. Some of the messages may be there, stored after the loss.
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
    `swept`: streams of which messages may have been deleted anywhere, since they were chunks that nobody listed.
    """

    run: str
    term: str = ""
    trimmed: dict[str, int] = {}
    holds: dict[str, Hold] = {}
    lost: dict[str, list[LostRange]] = {}
    swept: list[str] = []

    def is_lost(self, stream: str, seq: int) -> bool:
        """Whether what was stored at `seq` of a stream is known to be lost."""
        return any(one.first <= seq <= one.last for one in self.lost.get(stream, ()))

    def next_known(self, stream: str, seq: int) -> int:
        """Return the first sequence of a stream from `seq` on that is not known to be lost."""
        for one in sorted(self.lost.get(stream, ()), key=lambda one: one.first):
            if one.first <= seq <= one.last:
                seq = one.last + 1
        return seq

    def standing(self, now_ns: int) -> dict[str, Hold]:
        """Return the holds that have not lapsed at `now_ns`, the server's time."""
        return {name: hold for name, hold in self.holds.items() if hold.expires_ns > now_ns}

    def check(self) -> None:
        sequences = [*self.trimmed.values(), *(seq for hold in self.holds.values() for seq in hold.needs.values())]
        if any(seq < 0 for seq in sequences):
            raise SchemaError("trimmed, holds: a sequence must not be negative")
