"""The record of a run's history: how far it may have been trimmed, and who holds what back from that; and what the runs
of a server have been promised of its streams.

One key a run, and one for all runs, changed by compare-and-set alone. So a hold and a trim, or two promises of the same
bytes, can never miss each other: whoever wrote first is seen by the other.
"""

import msgspec

from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Count

__all__ = ["Hold", "Reservation", "Reservations", "Retention"]


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

    `term` names the governor that trims; `holds` are by the name of who holds.
    """

    run: str
    term: str = ""
    trimmed: dict[str, int] = {}
    holds: dict[str, Hold] = {}

    def standing(self, now_ns: int) -> dict[str, Hold]:
        """Return the holds that have not lapsed at `now_ns`, the server's time."""
        return {name: hold for name, hold in self.holds.items() if hold.expires_ns > now_ns}

    def check(self) -> None:
        sequences = [*self.trimmed.values(), *(seq for hold in self.holds.values() for seq in hold.needs.values())]
        if any(seq < 0 for seq in sequences):
            raise SchemaError("trimmed, holds: a sequence must not be negative")


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What one run may promise at most, and what it asks for beyond that, bytes by stream.

    It lasts until `expires_ns` (Unix time) unless renewed; `term` names the governor that promises.
    """

    term: str
    expires_ns: int
    bytes: dict[str, Count]
    wants: dict[str, Count] = {}


class Reservations(Event, frozen=True, kw_only=True):
    """The reservations of all runs that share streams, by run."""

    runs: dict[str, Reservation] = {}
