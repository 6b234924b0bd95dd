"""Verifies a ledger: its chain, its reports, and each manifest, which it rebuilds from the streams.

Reads the ledger of a live or offline trainer and the streams that it was made from. Returns findings, and the state of
the ledger. It writes nothing and needs no torch. Trimmed history is counted, never taken for equal.
"""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import decode_owned
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import LedgerError, NotFoundError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger, newest_entry
from lachesis.pipeline.offline.replay.results import RevisionResult, read_results, revision_digest
from lachesis.pipeline.offline.replay.revisions import definition, events_of
from lachesis.pipeline.offline.reproduction.logic import BatchIngredient, difference, rebuilt
from lachesis.pipeline.offline.trainer.batch_former import entry_content_digest, manifest_digest
from lachesis.pipeline.offline.trainer.ledger import rebuild_entries
from lachesis.pipeline.offline.verification.checks import CheckVerdict, NumericFinding
from lachesis.pipeline.retention.holds import read_record as retention_record
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupReward, RewardEvent
from lachesis.schemas.errors import ConfigError, DataError, LachesisError, SchemaError, VersionError
from lachesis.schemas.ledger import GENESIS, Batch, LedgerEntry, TrainReport
from lachesis.schemas.planning_header import Plan
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS

__all__ = ["LedgerReplayFacts", "Progress", "is_trimmed", "verify_batches"]

Progress = Callable[[int, int], None]
"""Called with how much is done, of how much."""

_MAX_REPORTED = 3


@dataclass(slots=True)
class LedgerReplayFacts:
    """What a ledger was found to be. `manifest` names its batches in order, `reports` are all of its trainer's."""

    entries: int = 0
    batches: int = 0
    chain: str = GENESIS
    manifest: str = GENESIS
    reports: list[TrainReport] = field(default_factory=list)

    @property
    def voids(self) -> set[int]:
        """The batches that could not be trained."""
        return {void.batch for report in self.reports for void in report.voids}

    @property
    def drops(self) -> dict[int, set[int]]:
        """By batch, the groups (by sequence in ROLLOUTS) that its trainer left out of the step."""
        found: dict[int, set[int]] = {}
        for drops in (drops for report in self.reports for drops in report.drops):
            found.setdefault(drops.batch, set()).update(drops.seqs)
        return found


class _RewardedRollout(NamedTuple):
    """A reward, which counts for copies of its group from sequence `first` on: another revision scores those below."""

    first: int
    reward: GroupReward


async def verify_batches(
    bus: Bus,
    config: RunConfig,
    trainer: str,
    record: OfflineTrainerRecord | None,
    *,
    saved: Mapping[str, LedgerPosition],
    progress: Progress,
) -> tuple[LedgerReplayFacts, list[NumericFinding]]:
    """Verify a ledger to its end as of now.

    `saved` are positions that checkpoints hold, by the checkpoint's name.

    Raises `NotFoundError` where the trainer has no ledger.
    """
    check = _LedgerWalk(bus, config, trainer, record, progress)
    # each is stored before the one above it: the ledger has what a report names, and the streams its rewards
    check.facts.reports = await _reports(bus, config.run, trainer)
    last, _, _ = await newest_entry(bus, config.run, trainer)
    if last is None:
        raise NotFoundError(
            f"run {config.run} has no ledger of trainer {trainer!r}: nothing was batched, or --trainer names another"
        )
    check.total = last.next_batch
    readable = await check.read_rewards()
    try:
        await check.verify(saved, last.index)
    except VersionError:
        raise
    except (LedgerError, SchemaError) as error:
        check.fail("chain", str(error))
    else:
        if record is not None and readable:
            await check.form_again(record)
    return check.facts, check.findings()


async def is_trimmed(bus: Bus, run: str, stream: str, seq: int) -> bool:
    """Return whether history may be gone at `seq`, so that its absence says nothing else."""
    return seq < (await retention_record(bus, run)).trimmed.get(stream, 1)


class _LedgerWalk:
    def __init__(
        self, bus: Bus, config: RunConfig, trainer: str, record: OfflineTrainerRecord | None, progress: Progress
    ) -> None:
        self.facts = LedgerReplayFacts()
        self.total = 0
        self._bus = bus
        self._config = config
        self._trainer = trainer
        self._offline = record
        self._progress = progress
        self._rewards: dict[str, list[_RewardedRollout]] | None = None
        self._digests: list[str] = []
        self._contents: list[str] = []
        self._teachers: dict[int, int] = {}
        self._equal = self._trimmed = 0
        self._failures: dict[str, list[str]] = {}
        self._results: list[RevisionResult] = []
        self._walked = False

    def fail(self, what: str, text: str) -> None:
        self._failures.setdefault(what, []).append(text)

    def findings(self) -> list[NumericFinding]:
        """Return the outcome of every check, what failed with its first few reasons."""
        facts = self.facts
        texts = {
            "chain": f"{facts.entries} entries follow one another, the last is {facts.chain[:12]}",
            "reports": f"{len(facts.reports)} reports and the checkpoints kept name this ledger",
            "batches": f"{self._equal} of {facts.batches} rebuilt from the streams are equal"
            f"{self._unchecked()}; digest {facts.manifest[:12]}",
        }
        if self._offline is not None:
            texts["order"] = f"revision {self._offline.revision} gives the same entries again"
        if not self._walked:
            del texts["reports"]  # the ledger was not read as far as they go
        found = []
        for check, text in texts.items():
            failures = self._failures.get(check, [])
            more = f"; and {len(failures) - _MAX_REPORTED} more" if len(failures) > _MAX_REPORTED else ""
            verdict: CheckVerdict = "fail" if failures else "warn" if check == "batches" and not self._equal else "ok"
            said = "; ".join(failures[:_MAX_REPORTED]) + more if failures else text
            found.append(NumericFinding(check=check, subject=self._trainer, verdict=verdict, text=said))
        return found

    def _unchecked(self) -> str:
        unchecked = self.facts.batches - self._equal - len(self._failures.get("batches", ()))
        why = "what they are made of was trimmed" if unchecked == self._trimmed else "the revision cannot be read"
        return f", {unchecked} cannot be made: {why}" if unchecked else ""

    async def read_rewards(self) -> bool:
        """Take up the rewards that batches were made from: of several for one group the first stored counts.

        False: they are of a revision that cannot be read.
        """
        if self._offline is not None:
            try:
                revision = await definition(self._bus, self._config, self._offline.revision)
                if revision is None:
                    raise ConfigError(f"revision {self._offline.revision!r} is the live one of this configuration")
                self._results = await read_results(self._bus, revision)
                digest = await revision_digest(self._bus, revision)
            except (LedgerError, NotFoundError) as error:
                self.fail("order", f"revision {self._offline.revision} is not what it was: {error}")
                self._rewards = None
                return False
            if digest != self._offline.digest:
                self.fail(
                    "order",
                    f"revision {self._offline.revision} is {digest}, and was {self._offline.digest}",
                )
            self._rewards = {
                one.group: [_RewardedRollout(1, one.reward)]
                for one in reversed(self._results)
                if one.reward is not None
            }
            return True
        self._rewards = await self._live_rewards()
        return True

    async def _live_rewards(self) -> dict[str, list[_RewardedRollout]]:
        found: dict[str, list[_RewardedRollout]] = {}
        subject = subjects.event("reward", self._config.run, self._config.revision)
        async with events_of(self._bus, EVENTS, subject, RewardEvent) as events:
            async for event in events:
                first = event.promoted or 1
                for reward in event.groups:
                    known = found.setdefault(reward.group, [])
                    if all(first < one.first for one in known):  # or it never counts
                        known.append(_RewardedRollout(first, reward))
        return found

    async def verify(self, saved: Mapping[str, LedgerPosition], last: int) -> None:
        """Follow the ledger from its first entry to entry `last`, and rebuild every batch.

        Compare what names a place in the ledger. The rewards of later entries may not have been read.
        """
        entries = follow_ledger(self._bus, self._config.run, self._trainer, LedgerPosition(), follow=False)
        async with aclosing(entries):
            async for entry in entries:
                self._check_entry(entry)
                if entry.batch is not None:
                    await self._batch(entry.batch, self._std_floor(entry))
                    self._progress(entry.batch.number + 1, max(self.total, entry.next_batch))
                if entry.index == last:
                    break
        self._walked = True
        for name, position in self._named(saved):
            if not position.entries <= len(self._digests):
                self.fail("reports", f"{name} holds {position.entries} entries, the ledger {len(self._digests)}")
            elif position.entries and self._digests[position.entries - 1] != position.digest:
                self.fail(
                    "reports",
                    f"{name} names entry {position.entries - 1} as {position.digest[:12]}, it is "
                    f"{self._digests[position.entries - 1][:12]}",
                )

    def _named(self, saved: Mapping[str, LedgerPosition]) -> list[tuple[str, LedgerPosition]]:
        reports = [
            (f"the report of step {report.step}", LedgerPosition(report.ledger_index + 1, report.chain))
            for report in self.facts.reports
        ]
        return [*reports, *((f"checkpoint {name}", position) for name, position in saved.items())]

    def _check_entry(self, entry: LedgerEntry) -> None:
        facts = self.facts
        facts.entries, facts.chain = entry.index + 1, entry.digest()
        self._digests.append(facts.chain)
        if self._offline is not None:
            self._contents.append(entry_content_digest(entry))
            refs = entry.batch.groups if entry.batch else []
            self._teachers |= {ref.seq: ref.teacher for ref in refs if ref.teacher is not None}

    async def _batch(self, batch: Batch, std_floor: float) -> None:
        facts = self.facts
        if batch.number != facts.batches:
            self.fail("chain", f"batch {batch.number} where {facts.batches} follows")
        facts.batches, facts.manifest = batch.number + 1, manifest_digest(facts.manifest, batch)
        if self._rewards is None:
            return
        try:
            ingredients = await self._read_ingredients(batch)
        except DataError as error:
            if await self._may_be_gone(batch, error):
                self._trimmed += 1
            else:
                self.fail("batches", f"batch {batch.number}: {error}")
            return
        if ingredients is None:
            return
        try:
            text = difference(batch, rebuilt(batch, ingredients, std_floor))
        except DataError as error:
            text = f"batch {batch.number}: {error}"
        if text is None:
            self._equal += 1
        else:
            self.fail("batches", text)

    def _std_floor(self, entry: LedgerEntry) -> float:
        if self._offline is not None:
            return self._offline.std_floor
        return entry.promoted.std_floor if entry.promoted else self._config.advantage.std_floor

    async def _read_ingredients(self, batch: Batch) -> list[BatchIngredient] | None:
        found = []
        for ref, group, _ in await fetch_batch(self._bus, batch):
            stored = self._rewards.pop(ref.group, []) if self._rewards is not None else []
            reward = next((one.reward for one in stored if one.first <= ref.seq), None)
            if reward is None:
                if self._offline is None and await self._rewards_trimmed():
                    self._trimmed += 1
                else:
                    self.fail("batches", f"batch {batch.number}, group {ref.group}: it has no reward in the streams")
                return None
            # only the ledger says which logprobs were taken; that they fit the group was checked
            found.append(BatchIngredient(ref.seq, group.env, Plan.of(group), reward, ref.teacher))
        return found

    async def _rewards_trimmed(self) -> bool:
        return await is_trimmed(self._bus, self._config.run, EVENTS, 2)

    async def _may_be_gone(self, batch: Batch, error: DataError) -> bool:
        if not isinstance(error.__cause__, NotFoundError):
            return False
        lowest = min(ref.seq for ref in batch.groups)
        teachers = [ref.teacher for ref in batch.groups if ref.teacher is not None]
        return await is_trimmed(self._bus, self._config.run, ROLLOUTS, lowest) or (
            bool(teachers) and await is_trimmed(self._bus, self._config.run, subjects.TEACHER, min(teachers))
        )

    async def form_again(self, record: OfflineTrainerRecord) -> None:
        """Form the whole ledger of an offline trainer again and compare it entry by entry."""
        try:
            again = await rebuild_entries(self._bus, record, self._results, self._teachers, self._progress)
        except LachesisError as error:
            self.fail("order", str(error))
            return
        if again[: len(self._contents)] != self._contents:
            pairs = zip(again, self._contents, strict=False)
            first = next((i for i, (new, old) in enumerate(pairs) if new != old), len(again))
            self.fail("order", f"entry {first} of {len(self._contents)} is another when it is formed again")


async def _reports(bus: Bus, run: str, trainer: str) -> list[TrainReport]:
    found = []
    subject = subjects.state(run, "trainer", subjects.LIVE, trainer)
    left_out = await read_skipped(bus)
    async with bus.read(LEDGER, [subject], follow=False) as messages:
        async for message in messages:
            report = await decode_owned(bus, TrainReport, message, lambda one: one.run == run, left_out=left_out)
            if report is not None:
                found.append(report)
    return found
