"""The chain of the ledger: each entry names the digest of the one before. Pure."""

from dataclasses import dataclass
from typing import Self

from lachesis.schemas.errors import LedgerError
from lachesis.schemas.ledger import GENESIS, LedgerEntry

__all__ = ["Position"]


@dataclass(frozen=True, slots=True)
class Position:
    """How far somebody has read: `entries` of them, the last of which has the digest `digest`."""

    entries: int = 0
    digest: str = GENESIS

    def after(self, entry: LedgerEntry) -> Self:
        """Return the position after `entry`, which must be the next one.

        Raises `LedgerError` on a gap, and when the entry does not follow the one this position knows: the ledger is
        another than the one that was read before.
        """
        if entry.index != self.entries:
            raise LedgerError(
                f"ledger of run {entry.run}, trainer {entry.trainer}: entry {entry.index} where {self.entries} follows"
            )
        if entry.previous != self.digest:
            raise LedgerError(
                f"ledger of run {entry.run}, trainer {entry.trainer}: entry {entry.index} follows "
                f"{entry.previous[:12]}, but entry {self.entries - 1} was {self.digest[:12]}; the broker's history was "
                "rolled back or replaced: restore it, or start a new run"
            )
        return type(self)(entry.index + 1, entry.digest())
