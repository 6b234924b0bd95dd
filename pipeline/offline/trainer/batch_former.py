"""Forms the offline trainer's batches: groups in the order of ROLLOUTS in, ledger entries out. Pure.

The same join, selection, whitening and chain as in a live run, with nothing in it that depends on when anything came:
the same groups and settings give the same entries to the bit. Every group fed has exactly one outcome in the end.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.entry_former import GROUPS_PER_SELECTION, MAX_OUTCOMES_PER_ENTRY, EntryFormer
from lachesis.pipeline.batcher.join import Joiner
from lachesis.pipeline.ledger.chain import Chain
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.schemas.annotations import GroupReward, TeacherPointer
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.rollout import RolloutGroup

__all__ = [
    "OfflineBatchFormer",
    "OfflineGroup",
    "batch_digest",
    "entry_content_digest",
    "manifest_digest",
    "without_logprobs",
]


class OfflineGroup(NamedTuple):
    """A rollout with the reward that a revision gave it; `teacher` is the sequence of its logprobs in TEACHER."""

    seq: int
    env: str
    plan: Plan
    reward: GroupReward
    teacher: int | None = None


class OfflineBatchFormer:
    """Feed it with `add` in rising sequence, then `finish`; each hands out the entries that follow."""

    def __init__(
        self,
        run: str,
        trainer: str,
        config: BatchingConfig,
        start: OfflineStart,
        *,
        std_floor: float,
        term: str = "",
        written_ns: int = 0,
    ) -> None:
        # nothing can still come, so nothing is waited for
        config = msgspec.structs.replace(config, teacher_deadline_s=None, score_deadline_s=None)
        self._joiner = Joiner(config, offline=start)
        self._chain = Chain(run, trainer, term)
        self._former = EntryFormer(config, self._joiner, self._chain)
        self._std_floor = std_floor
        self._written_ns = written_ns
        self._fed = 0
        self.groups = 0
        """Groups in batches."""
        self.manifest = GENESIS
        """Names all batches formed so far, in order, whatever the trainer is called."""

    @property
    def batches(self) -> int:
        return self._chain.next_batch

    @property
    def chain(self) -> str:
        """Digest of the last entry."""
        return self._chain.position.digest

    def add(self, group: OfflineGroup) -> Iterator[LedgerEntry]:
        """Take in the next group."""
        self._joiner.member(group.seq, group.env, group.plan, 0, 0)
        self._joiner.teacher(0, 0, TeacherPointer(group=group.plan.group, seq=group.seq, stored=group.teacher))
        self._joiner.reward(0, 0, msgspec.structs.replace(group.reward, stamps=[]))
        self._fed += 1
        if self._fed % GROUPS_PER_SELECTION == 0:
            yield from self._form()

    def finish(self) -> Iterator[LedgerEntry]:
        """Form what is left, the last batch smaller than the others if need be, and record every outcome."""
        yield from self._form()
        while (groups := self._former.choose(incomplete=True)) is not None:
            yield self._entry(groups)
        while self._joiner.unrecorded_outcomes:
            yield self._entry([])

    def _form(self) -> Iterator[LedgerEntry]:
        while (groups := self._former.choose()) is not None:
            yield self._entry(groups)
        while self._joiner.unrecorded_outcomes >= MAX_OUTCOMES_PER_ENTRY:
            yield self._entry([])

    def _entry(self, groups: list[GroupRef]) -> LedgerEntry:
        content = self._former.next_entry_content(groups, self._std_floor)
        if content.batch is not None:
            self.manifest = manifest_digest(self.manifest, content.batch)
            self.groups += len(groups)
        return self._former.write(content, written_ns=self._written_ns)


def entry_content_digest(entry: LedgerEntry) -> str:
    """Return the digest of an entry without its place in a chain."""
    return entry.replace(previous=GENESIS).digest()


def batch_digest(batch: Batch) -> str:
    """Return what names a batch: SHA-256 (hex) of its manifest."""
    return hashlib.sha256(msgspec.msgpack.encode(batch, order="deterministic")).hexdigest()


def manifest_digest(before: str, batch: Batch) -> str:
    """Return what names the batches up to `batch`, where `before` names those up to the one before it."""
    return hashlib.sha256(f"{before} {batch_digest(batch)}".encode()).hexdigest()


def without_logprobs(group: RolloutGroup) -> bool:
    """Return whether the logprobs that the group was sampled with are missing.

    They are where there are none, or where all are 0 that would be trained on. Samples that differ cannot all have had
    the probability 1; where they do not differ there is nothing to learn.
    """
    if group.sequences.logprobs is None:
        return True
    trained = [one.logprobs[one.loss_mask] for one in group.sequences if one.logprobs is not None]
    return any(len(values) for values in trained) and not any(values.any() for values in trained)
