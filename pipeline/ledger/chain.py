"""The chain of the ledger: each entry names the digest of the one before. Pure.

The writer uses `Chain` to make entries that follow each other; a reader uses `LedgerPosition` to refuse an entry that
does not follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import msgspec

from lachesis.pipeline.errors import LedgerError
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry, Outcome, ProducerMark

__all__ = ["PREVIOUS_HEADER", "Chain", "JoinState", "LedgerPosition", "make_batch"]

PREVIOUS_HEADER = "Lachesis-Previous"
"""Header of an entry: the sequence in LEDGER of the entry before, 0 at the first. Lets a reader walk backwards."""

_HINT = (
    "`lachesis runs recover` makes the run go on with the entries that follow one another. Or restore the server's "
    "store from a backup, or start a new run"
)


class JoinState(NamedTuple):
    """The part of a ledger entry that the joiner keeps; see `LedgerEntry`."""

    watermark: int
    resolved: bytes
    events_cursor: int
    producers: dict[str, ProducerMark]


@dataclass(frozen=True, slots=True)
class LedgerPosition:
    """How far a reader has read: `entries` entries, of which the last has the digest `digest`."""

    entries: int = 0
    digest: str = GENESIS

    def after(self, entry: LedgerEntry) -> Self:
        """Return the position after `entry`, which must be the next one.

        Raises `LedgerError` on a gap, and if the entry does not follow the one this position knows: then the ledger is
        not the one that was read before.
        """
        ledger = f"ledger of run {entry.run}, trainer {entry.trainer}"
        if entry.index != self.entries:
            raise LedgerError(f"{ledger}: entry {entry.index} where {self.entries} follows. {_HINT}")
        if entry.previous != self.digest:
            raise LedgerError(
                f"{ledger}: entry {entry.index} follows {entry.previous[:12]}, but entry {self.entries - 1} was "
                f"{self.digest[:12]}; the broker's history was rolled back or replaced, or somebody has the batcher's "
                f"key. {_HINT}"
            )
        return type(self)(entry.index + 1, entry.digest())


class Chain:
    """The writer's end of the chain. `last` is the newest entry stored, None where there is none.

    `totals` counts groups by outcome (`batched` is one), and the sequences of all of them and of the batched ones.
    `promoted` is recorded in every entry from the next one on.
    """

    def __init__(self, run: str, trainer: str, term: str, last: LedgerEntry | None = None) -> None:
        self._run = run
        self._trainer = trainer
        self._term = term
        self.position = LedgerPosition(last.index + 1, last.digest()) if last else LedgerPosition()
        self.next_batch = last.next_batch if last else 0
        self.totals = dict(last.totals) if last else {}
        self.promoted = (last.promoted or None) if last else None

    def extend(
        self,
        state: JoinState,
        *,
        batch: Batch | None,
        outcomes: Sequence[Outcome],
        stamps: dict[str, list[Stamp]],
        written_ns: int,
        stale: dict[str, list[int]] | None = None,
    ) -> LedgerEntry:
        """Return the next entry, and count it as written; a caller that cannot store it must stop."""
        groups = batch.groups if batch else []
        for outcome in outcomes:
            self._count(outcome.kind)
            self._count("sequences", outcome.sequences)
        if batch is not None:
            self._count("batched", len(groups))
            self._count("sequences", batch.sequences)
            self._count("batched_sequences", batch.sequences)
            self.next_batch = batch.number + 1
        entry = LedgerEntry(
            run=self._run,
            trainer=self._trainer,
            index=self.position.entries,
            previous=self.position.digest,
            watermark=state.watermark,
            resolved=state.resolved,
            events_cursor=state.events_cursor,
            producers=state.producers,
            batch=batch,
            outcomes=list(outcomes),
            totals=dict(self.totals),
            next_batch=self.next_batch,
            promoted=self.promoted or msgspec.UNSET,
            stale=stale or msgspec.UNSET,
            term=self._term,
            written_ns=written_ns,
            stamps=stamps,
        )
        self.position = self.position.after(entry)
        return entry

    def _count(self, what: str, by: int = 1) -> None:
        self.totals[what] = self.totals.get(what, 0) + by


def make_batch(number: int, groups: Sequence[GroupRef], batch_size: int) -> Batch:
    """Return batch `number`, its groups in the order of ROLLOUTS."""
    sequences = sum(ref.sequences for ref in groups)
    return Batch(
        number=number,
        groups=sorted(groups, key=lambda ref: ref.seq),
        sequences=sequences,
        tokens=sum(ref.tokens for ref in groups),
        complete=sequences == batch_size,
    )
