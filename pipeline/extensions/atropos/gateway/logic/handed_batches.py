"""Records which batches of a ledger each trainer got over HTTP, and which of them count as trained.

Pure; stored as one value. Guarantees that a batch is handed to only one member of a consumer, again and again until its
reply was received, and that the trained position never passes a batch that is still handed out.
"""

from typing import Self

import msgspec

from lachesis.pipeline.extensions.atropos.gateway.protocol import RegisterTrainer
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.schemas.ledger import GENESIS, GroupDrops, LedgerEntry, VoidBatch

__all__ = ["Consumer", "HandedBatch", "TrainedUpTo"]


class HandedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that a member holds. `seq` is the place of its entry in LEDGER, `index` and `previous` are the entry's.

    `received`: all but the last byte of the reply had been written to a client that was still there.
    """

    number: int
    seq: int
    index: int
    previous: str
    received: bool = False


class TrainedUpTo(msgspec.Struct, frozen=True):
    """Everything before batch `next_batch`, which is everything before `position`, is trained or void."""

    position: LedgerPosition
    next_batch: int


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """The members that share one reading of the ledger, by user name, and how far it has come.

    `entries`, `digest` and `seq` are of the last entry read, `next_batch` is the number of the next batch.
    """

    lineage: str
    entries: int = 0
    digest: str = GENESIS
    seq: int = 0
    next_batch: int = 0
    registered: dict[str, RegisterTrainer] = {}
    handed: dict[str, HandedBatch] = {}
    voids: list[VoidBatch] = []
    drops: list[GroupDrops] = []

    @property
    def position(self) -> LedgerPosition:
        return LedgerPosition(self.entries, self.digest)

    @property
    def trained(self) -> TrainedUpTo:
        """How far everything is trained: up to the oldest batch that a member still holds."""
        oldest = min(self.handed.values(), key=lambda batch: batch.number, default=None)
        if oldest is None:
            return TrainedUpTo(self.position, self.next_batch)
        return TrainedUpTo(LedgerPosition(oldest.index, oldest.previous), oldest.number)

    def register(self, member: str, request: RegisterTrainer) -> Self:
        """Return it with the member's newest settings.

        What the member holds, it gets again: it has started again.
        """
        handed = dict(self.handed)
        if member in handed:
            handed[member] = msgspec.structs.replace(handed[member], received=False)
        others = {name: known for name, known in self.registered.items() if name != member}
        return msgspec.structs.replace(self, registered=others | {member: request}, handed=handed)  # the newest is last

    def forget_members(self) -> Self:
        """Return it without registered members. Batches handed out stay handed out."""
        return msgspec.structs.replace(self, registered={})

    def read(self, entry: LedgerEntry, seq: int) -> Self:
        """Return it after `entry`, which lies at `seq` of LEDGER.

        Raises `LedgerError` when it does not follow.
        """
        position = self.position.after(entry)
        return msgspec.structs.replace(
            self, entries=position.entries, digest=position.digest, seq=seq, next_batch=entry.next_batch
        )

    def hand_out(self, member: str, entry: LedgerEntry, seq: int, drops: list[GroupDrops]) -> Self:
        """Return it after `entry`; the member holds its batch from now on, without the groups in `drops`."""
        number = entry.next_batch - 1
        batch = HandedBatch(number=number, seq=seq, index=entry.index, previous=entry.previous)
        read = self.read(entry, seq)
        return msgspec.structs.replace(read, handed=self.handed | {member: batch}, drops=[*self.drops, *drops])

    def void(self, entry: LedgerEntry, seq: int, reason: str) -> Self:
        """Return it after `entry`, which has a batch of which nothing can be trained."""
        return msgspec.structs.replace(
            self.read(entry, seq), voids=[*self.voids, VoidBatch(entry.next_batch - 1, reason)]
        )

    def record_receipt(self, member: str, number: int, *, received: bool) -> Self:
        """Return it with whether the member received batch `number`, if it still holds that one."""
        held = self.handed.get(member)
        if held is None or held.number != number:
            return self
        noted = msgspec.structs.replace(held, received=received)
        return msgspec.structs.replace(self, handed=self.handed | {member: noted})

    def train(self, member: str) -> Self:
        """Return it with the batch that the member holds counted as trained."""
        return msgspec.structs.replace(
            self, handed={name: batch for name, batch in self.handed.items() if name != member}
        )

    def reported(self, next_batch: int) -> Self:
        """Return it without what the report up to batch `next_batch` says of voids and drops."""
        return msgspec.structs.replace(
            self,
            voids=[void for void in self.voids if void.batch >= next_batch],
            drops=[drops for drops in self.drops if drops.batch >= next_batch],
        )
