"""The feed: a trainer's side of the ledger.

It reads batches, and writes policy records and reports of durable progress.

`lachesis.batches` and the trainer service share it. A position is the number of ledger entries consumed and the digest
of the last of them; following the ledger verifies the chain from there on. Reports and policy records are fenced: if
two trainers have one name, the later one wins and the other gets `FencedError`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.errors import BusClosedError, DamagedError, FencedError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.evidence import describe_known_checkpoint
from lachesis.pipeline.ledger.reader import Payload, fetch_groups, find_position, follow_ledger
from lachesis.pipeline.runtime.retries import WaitLog, is_infrastructure, retry_outages
from lachesis.pipeline.trainer.group_split import share_of
from lachesis.pipeline.trainer.sequences import GroupInputs, TrainableBatch, select_trainable
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord, TokenProbe
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import (
    Batch,
    GroupDrops,
    LedgerEntry,
    Mismatch,
    Numerics,
    StepTimes,
    TrainReport,
    VoidBatch,
)
from lachesis.schemas.rollout import PackedGroup

__all__ = ["BatchFeed", "LedgerBatch"]

log = logging.getLogger("lachesis")


@dataclass(frozen=True, slots=True)
class LedgerBatch:
    """One batch with its payloads. `unfetched`: by sequence in ROLLOUTS, why a group's payload could not be had.

    Of several ranks each fetches its share of `batch`; what the others know of theirs is in the last two.
    """

    entry: LedgerEntry
    batch: Batch
    groups: list[Payload]
    unfetched: dict[int, DataError] = field(default_factory=dict)
    started_elsewhere_ns: dict[str, int] = field(default_factory=dict)
    versions_elsewhere: dict[str, str] = field(default_factory=dict)

    @property
    def started_ns(self) -> dict[str, int]:
        """When the environment took each group up, Unix ns."""
        return self.started_elsewhere_ns | {ref.group: group.started_ns for ref, group, _ in self.groups}

    @property
    def policy_versions(self) -> dict[str, str]:
        """The first policy version that each group was sampled with."""
        return self.versions_elsewhere | {ref.group: group.policy_versions[0] for ref, group, _ in self.groups}

    def select(
        self, limits: TrainerLimits, *, inputs: GroupInputs | None = None, shuffle_seed: int | None = None
    ) -> TrainableBatch:
        """Return the usable groups of the batch. Raises `DataError`, saying why, if none is usable.

        `inputs`, `shuffle_seed`: see `select_trainable`.
        """
        unfetched = {seq: str(error) for seq, error in self.unfetched.items()}
        selected = select_trainable(self.groups, limits, inputs=inputs, unfetched=unfetched, shuffle_seed=shuffle_seed)
        if not selected.sequences:
            first = next((selected.dropped[ref.seq] for ref in self.batch.groups if ref.seq in selected.dropped), "")
            raise DataError(f"none of the batch's {len(self.batch.groups)} groups can be trained; the first: {first}")
        return selected

    def stamps(self, start_ns: int, end_ns: int) -> Mapping[str, list[Stamp]]:
        """Return each group's stage stamps, the trainer's own included."""
        own = Stamp("trainer", self.entry.written_ns, start_ns, end_ns)
        return {ref.group: [*self.entry.stamps.get(ref.group, []), own] for ref in self.batch.groups}


class BatchFeed:
    """Use `open`; then `batches`, `advance` past each batch taken into the weights, and `report_trained`."""

    def __init__(self, bus: Bus, run: str, trainer: str, term: str) -> None:
        self._bus = bus
        self._run = run
        self._trainer = trainer
        self._term = term
        self._report_subject = subjects.state(run, "trainer", subjects.LIVE, trainer)
        self._report_seq = 0
        self._policy_revision = 0
        self._wait_log = WaitLog()
        self.ranks = (0, 1)
        """Rank and number of ranks: each fetches the payloads of its share of a batch."""
        self.report: TrainReport | None = None
        self.policy: PolicyRecord | None = None
        """The newest policy that is known to be the run's."""
        self.position = LedgerPosition()

    @classmethod
    async def open(cls, bus: Bus, run: str, trainer: str, *, term: str) -> Self:
        """Return the feed, positioned after the last reported batch."""
        feed = cls(bus, run, trainer, term)
        feed.report, _, feed._report_seq = await read_last_event(
            bus, subjects.LEDGER, feed._report_subject, TrainReport, lambda report: report.run == run, newer="refuse"
        )
        if feed.report is not None:
            feed.position = LedgerPosition(feed.report.ledger_index + 1, feed.report.chain)
        try:
            policy = await bus.value(keys.POLICY)
        except DamagedError as error:  # the checkpoint is the truth; what is published next replaces the record
            log.warning("the published policy cannot be read and is published again: %s", error)
            policy = None
        feed._policy_revision = policy.revision if policy else 0
        feed.policy = _policy(policy.value) if policy else None
        return feed

    async def verify_position(self, position: LedgerPosition) -> None:
        """Make sure that the ledger goes as far as `position` and is the one it is of. Raises `LedgerError`."""
        await find_position(self._bus, self._run, self._trainer, position)

    async def describe_known_checkpoint(self, folder: Path) -> str:
        """Say which checkpoint in `folder` the ledger still knows."""
        return await describe_known_checkpoint(self._bus, self._run, self._trainer, folder, self.report)

    def mark_trained(self, fed: LedgerBatch) -> None:
        """Say that the batch is in the weights (or void)."""
        self.position = LedgerPosition(fed.entry.index + 1, fed.entry.digest())

    async def batches(self) -> AsyncGenerator[LedgerBatch]:
        """Yield the batches from the position on, for ever; an outage of the broker is waited out.

        Raises `LedgerError` where the chain does not hold, and for an entry that the batcher cannot have written: what
        it names may have been trained on already. It holds a reader open: a caller that may stop early closes
        it in the same task (`contextlib.aclosing`).
        """
        entries_ahead = follow_ledger(self._bus, self._run, self._trainer, self.position, refuse_misfits=True)
        async with aclosing(entries_ahead) as entries:
            async for entry in entries:
                if entry.batch is None:
                    continue
                groups: list[Payload]
                unfetched: dict[int, DataError]
                # A `VersionError` ends this: the group is good, this build too old, and nothing must be dropped for it.
                # It is raised only where a service that wrote or read the group says so (`bus.newer_writers`).
                fetch = retry_outages(f"fetch batch {entry.batch.number}", self._wait_log, is_outage=_may_come_back)
                groups, unfetched = await fetch(
                    fetch_groups, self._bus, share_of(entry.batch, *self.ranks), PackedGroup
                )
                yield LedgerBatch(entry, entry.batch, groups, unfetched)

    async def publish_policy(self, record: PolicyRecord) -> None:
        """Make `record` the run's policy. Raises `FencedError` when another trainer has published one."""
        try:
            revision = await self._bus.put(keys.POLICY, encode(record), revision=self._policy_revision)
        except FencedError:
            # An earlier attempt of ours may have been stored without our hearing of it: no two lives share a version.
            entry = await self._bus.value(keys.POLICY)
            known = _policy(entry.value) if entry else None
            if entry is None or known is None or known.version != record.version:
                raise
            revision = entry.revision
        self._policy_revision, self.policy = revision, record

    async def publish_weights(
        self,
        version: PolicyVersion,
        location: str,
        tokenizer_hash: str,
        vocabulary: int | None,
        token_probe: TokenProbe | None = None,
    ) -> None:
        """Make the weights at `location` the run's policy. Raises `FencedError`, as `publish_policy`.

        `location`: the path of a file, or `schemas.weights.weights_location`.

        `vocabulary` is the number of token ids that the model knows: rollouts with others are refused. `token_probe`:
        by what servers with its tokenizer are known.
        """
        before = [] if self.policy is None else [*(self.policy.earlier or []), self.policy.version]
        await self.publish_policy(
            PolicyRecord(
                run=self._run,
                version=str(version),
                weights=location,
                tokenizer_hash=tokenizer_hash,
                written_ns=time.time_ns(),
                vocabulary=vocabulary,
                earlier=[one for one in before if one != str(version)][-PolicyRecord.MAX_EARLIER :],
                token_probe=token_probe,
            )
        )

    async def report_trained(
        self,
        *,
        policy_version: str,
        step: int,
        lineage: str,
        checkpoint: str,
        voids: list[VoidBatch],
        drops: Sequence[GroupDrops] = (),
        next_batch: int | None = None,
        steps: Sequence[StepTimes] = (),
        mismatches: Sequence[Mismatch] = (),
        numerics: Numerics | None = None,
        position: LedgerPosition | None = None,
    ) -> None:
        """Report everything up to `position` (None: the feed's) as trained and durable. Raises `FencedError`.

        `step` is the optimizer step, `next_batch` (default: the same) the number of the first batch not in the weights;
        `steps` says when the steps since the last report were taken, `mismatches` what they found, `numerics` how;
        `drops` are the groups that were left out of batches since.
        """
        position = position or self.position
        self.report = TrainReport(
            run=self._run,
            trainer=self._trainer,
            lineage=lineage,
            term=self._term,
            step=step,
            ledger_index=position.entries - 1,
            chain=position.digest,
            next_batch=step if next_batch is None else next_batch,
            policy_version=policy_version,
            checkpoint=checkpoint,
            voids=voids,
            drops=list(drops),
            written_ns=time.time_ns(),
            steps=list(steps),
            mismatches=list(mismatches),
            numerics=numerics,
        )
        self._report_seq = await self._bus.commit(
            self._report_subject,
            encode(self.report),
            expected=self._report_seq,
            msg_id=commit_id(f"report.{self._run}.{self._trainer}.{self._term}.{step}"),
        )


def _may_come_back(error: BaseException) -> bool:
    return is_infrastructure(error) and not isinstance(error, BusClosedError)


def _policy(record: bytes) -> PolicyRecord | None:
    try:
        return decode(PolicyRecord, record)
    except SchemaError:
        return None
