"""Forms ledger entries from joined groups.

Live batches and those of an offline trainer are formed by the same code. Pure. From a joiner's ready groups and
outcomes and the ledger's chain, it makes each entry: the groups chosen for a batch, whitened, and the outcomes recorded
beside it. Guarantees that everything in an entry is recorded in the joiner before the entry is made, so that the entry
includes it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lachesis.pipeline.batcher.batch_choice import choose_batch
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.join import Joiner, PendingRollout
from lachesis.pipeline.batcher.whitening import whiten_batch
from lachesis.pipeline.ledger.chain import Chain, make_batch
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry

__all__ = ["GROUPS_PER_SELECTION", "MAX_OUTCOMES_PER_ENTRY", "EntryContent", "EntryFormer"]

GROUPS_PER_SELECTION = 256
"""Groups (live: messages) read between two selections; a mix of environments can choose from these."""
MAX_OUTCOMES_PER_ENTRY = 512
"""Outcomes in one entry, not counting its batch."""


class EntryContent(NamedTuple):
    """Content of the next entry: a batch or None, the rollouts in it, and the rollouts that were settled otherwise."""

    batch: Batch | None
    batched: list[PendingRollout]
    settled: list[PendingRollout]


class EntryFormer:
    """Feed the joiner; then call `choose`, `next_entry_content` and `write` as long as there is something to record."""

    def __init__(self, config: BatchingConfig, joiner: Joiner, chain: Chain) -> None:
        self.config = config
        self.joiner = joiner
        self.chain = chain
        joiner.drop_stale(chain.next_batch)

    def choose(self, *, incomplete: bool = False) -> list[GroupRef] | None:
        """Return the groups of the next batch, None if the ready ones do not fill one; see `choose_batch`.

        A group of another size than most, since some of its samples failed, may fit into no full batch. The last batch
        that may have it takes it, and is smaller by less than a group.
        """
        config, due = self.config, self.joiner.due()
        ready = list(self.joiner.ready.values())
        chosen = choose_batch(
            ready, config.batch_size, token_budget=config.token_budget, mix=config.mix, incomplete=incomplete
        )
        if chosen is None or due <= {ref.seq for ref in chosen}:
            return chosen
        first = self._largest([ref for ref in ready if ref.seq in due])
        return first + self._largest([ref for ref in ready if ref.seq not in due], beside=first)

    def _largest(self, groups: Sequence[GroupRef], *, beside: Sequence[GroupRef] = ()) -> list[GroupRef]:
        """Return of `groups` those that fill most of what a batch has left beside others."""
        config = self.config
        room = config.batch_size - sum(ref.sequences for ref in beside)
        budget = None if config.token_budget is None else config.token_budget - sum(ref.tokens for ref in beside)
        fit = [ref for ref in groups if ref.sequences <= room and (budget is None or ref.tokens <= budget)]
        return choose_batch(fit, room, token_budget=budget, mix=config.mix, incomplete=True) or []

    def next_entry_content(self, groups: Sequence[GroupRef], std_floor: float) -> EntryContent:
        """Record a batch of `groups`, whitened with `std_floor`, and the waiting outcomes.

        Without groups there is no batch.
        """
        batch = None
        if groups:
            # here and not with the rewards: the mean and deviation are those of the batch; see `whiten_batch`
            groups = whiten_batch(groups, self.joiner.to_whiten(ref.seq for ref in groups), std_floor)
            batch = make_batch(self.chain.next_batch, groups, self.config.batch_size)
        settled = self.joiner.take_outcomes(MAX_OUTCOMES_PER_ENTRY)
        return EntryContent(batch, self.joiner.record(ref.seq for ref in groups), settled)

    def write(
        self,
        content: EntryContent,
        *,
        written_ns: int,
        stamps: dict[str, list[Stamp]] | None = None,
        stale: Mapping[str, list[int]] | None = None,
    ) -> LedgerEntry:
        """Return the entry that records `content`, and drop groups that are too stale for the batch after it."""
        entry = self.chain.extend(
            self.joiner.state(),
            batch=content.batch,
            outcomes=[member.outcome for member in content.settled if member.outcome],
            stamps=stamps or {},
            stale=dict(stale) if stale else None,
            written_ns=written_ns,
        )
        if content.batch is not None:
            self.joiner.drop_stale(self.chain.next_batch)
        return entry
