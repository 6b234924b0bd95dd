"""Plans and carries out garbage collection of a run's history, by the rules of `garbage`.

Guarantees:

* it may run beside a live governor: both record what may be gone by compare-and-set in one record (`retention`), which
  also has the holds, so neither deletes what the other, or a hold, was promised; the governor's term is left as it is;
* if the command is killed anywhere, the same command finishes the work: the record of what is gone covers at least what
  is gone, and a revision's definition is deleted after all that it defines.
"""

import logging
import re
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.routing import LARGE_HEADER, SIZE_HEADER
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry, position_before
from lachesis.pipeline.retention import retention_floor
from lachesis.pipeline.retention.garbage import (
    GcDecider,
    GcDecision,
    OfflineTrainer,
    StoredHeader,
    StoredRevision,
    collectable,
    ledger_claims,
    old_revisions,
)
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.pipeline.retention.readers import Readers
from lachesis.pipeline.retention.retention_floor import RetentionClaim
from lachesis.pipeline.retention.settings import HistorySettings
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.replay import OfflineTrainerRecord
from lachesis.schemas.retention import Hold, Retention
from lachesis.schemas.subjects import CALLS, EVENTS, LEDGER, REPLAY, ROLLOUTS, TEACHER

__all__ = ["GarbageCollector", "GcLimits", "GcPlan"]

log = logging.getLogger("lachesis")

_OVERHEAD_BYTES = 22
"""Bytes that the server's store adds to a message."""


class GcLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the history to keep: nothing older than `older_than_s`, at most `keep_bytes` per stream.

    None: no limit. `revisions` are deleted whatever their age, and so are `trainers` on them, done or not. `ledger`:
    the beginning of the ledger may be deleted too.
    """

    older_than_s: float | None = None
    keep_bytes: int | None = None
    revisions: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    ledger: bool = False


@dataclass(slots=True)
class GcPlan:
    """The plan of a collection: by stream, the run's messages and bytes, and which are deleted."""

    totals: dict[str, tuple[int, int]] = field(default_factory=dict)
    decisions: dict[str, GcDecision] = field(default_factory=dict)
    revisions: list[StoredRevision] = field(default_factory=list)
    going: list[StoredRevision] = field(default_factory=list)
    trainers: list[OfflineTrainer] = field(default_factory=list)
    leaving: list[OfflineTrainer] = field(default_factory=list)


class GarbageCollector:
    """Call `plan`, then `collect` with the plan."""

    def __init__(self, bus: NatsBus, settings: HistorySettings) -> None:
        self._bus = bus
        self._settings = settings
        self._gone: list[str] = []

    async def plan(self, limits: GcLimits) -> GcPlan:
        """Return what is to be deleted.

        Raises `NotFoundError` if a named revision or trainer is unknown, `ConfigError` if it is needed, `SchemaError`
        if a record that limits the deletion cannot be read.
        """
        settings = self._settings
        self._gone = await self._gone_environments()
        now_ns = await self._bus.server_time_ns()
        born = None if limits.older_than_s is None else now_ns - int(limits.older_than_s * 1e9)
        holds = (await read_record(self._bus, settings.run)).standing(now_ns)
        claimed = [*await self._service_claims(), *retention_floor.hold_claims(holds)]
        found = GcPlan()
        ledger = subjects.ledger(settings.run, settings.trainer) if limits.ledger else None
        claimed += await self._conversation_claims(born)
        for stream in (ROLLOUTS, EVENTS, TEACHER, LEDGER, CALLS):
            names = collectable(stream, settings.run, settings.revision, self._environments(), ledger)
            found.totals[stream], found.decisions[stream] = await self._decide(
                stream, names, claimed, born=born, keep=limits.keep_bytes, now_ns=now_ns
            )
        found.trainers = [await self._measured(one) for one in await self._trainers(holds.values())]
        found.leaving = [one for one in found.trainers if one.name in limits.trainers]
        for trainer in found.leaving:
            self._check_idle(trainer)
        staying = [one for one in found.trainers if one not in found.leaving]
        found.revisions = await self._revisions(holds.values(), staying)
        self._check_known("revision", limits.revisions, [one.name for one in found.revisions])
        self._check_known("offline trainer", limits.trainers, [one.name for one in found.trainers])
        for one in found.revisions:
            if one.name in limits.revisions and one.held is not None:
                raise ConfigError(f"revision {one.name} of run {settings.run} is kept for {one.held}: end that first")
        size = sum(one.bytes for one in found.revisions)
        found.totals[REPLAY] = (sum(one.messages for one in found.revisions), size)
        excess = 0 if limits.keep_bytes is None else max(0, size - limits.keep_bytes)
        found.going = old_revisions(found.revisions, limits.revisions, born_before_ns=born, excess=excess)
        return found

    async def collect(self, found: GcPlan) -> None:
        """Delete what the plan names, except what is held by now."""
        for stream, decision in found.decisions.items():
            if decision.before:
                before = await self._agree(stream, decision.before)
                for subject, limit in before.items():
                    await self._bus.trim(stream, [subject], before=limit)
        for trainer in found.leaving:
            await self.delete_trainer(trainer.name)
        for revision in found.going:
            await self.delete_revision(revision.name)

    def _check_known(self, what: str, named: Collection[str], known: Collection[str]) -> None:
        missing = sorted(set(named) - set(known))
        if missing:
            raise NotFoundError(
                f"run {self._settings.run} has no {what} {missing[0]!r} to delete; there are "
                f"{', '.join(sorted(known)) or 'none'}"
            )

    def _check_idle(self, trainer: OfflineTrainer) -> None:
        if trainer.works:
            raise ConfigError(f"trainer {trainer.name} of run {self._settings.run} is at work: stop it first")

    async def delete_trainer(self, name: str) -> None:
        """Delete the ledger of an offline trainer, and the record that defines the trainer.

        Raises `ConfigError` if it is at work.
        """
        run = self._settings.run
        holds = (await read_record(self._bus, run)).standing(await self._bus.server_time_ns())
        for trainer in await self._trainers(holds.values()):
            if trainer.name == name:
                self._check_idle(trainer)
                for subject in _of_trainer(run, name):
                    await self._bus.delete_all(LEDGER, [subject])

    async def delete_revision(self, name: str) -> None:
        """Delete a whole revision. Raises `ConfigError` if a process works on it."""
        run = self._settings.run
        now_ns = await self._bus.server_time_ns()
        holds = (await read_record(self._bus, run)).standing(now_ns)
        trainers = await self._trainers(holds.values())
        if (user := _user(name, holds.values()) or _trainer_of(name, trainers)) is not None:
            raise ConfigError(f"revision {name} of run {run} is kept for {user}: end that first")
        await self._bus.delete_all(LEDGER, [subjects.state(run, "replay", name, "*")])
        await self._bus.delete_all(REPLAY, [subjects.replay("rescore", run, name)])
        await self._bus.delete_all(REPLAY, [subjects.revision(run, name)])

    # -- claims

    async def _gone_environments(self) -> list[str]:
        """Return the environments that the run no longer has, and that have stored messages, which readers need."""
        run, revision = self._settings.run, self._settings.revision
        stored = await self._bus.stored_subjects(ROLLOUTS, [subjects.rollout(run)])
        stored += await self._bus.stored_subjects(EVENTS, [f"rl.*.{run}.{revision}.*"])
        gone = {subject.rsplit(".", 1)[-1] for subject in stored} - set(self._settings.readers.environments)
        return [name for name in sorted(gone) if _is_environment(name)]

    def _environments(self) -> list[str]:
        """Return the environments with a history, those that the run no longer has included."""
        return [*self._settings.readers.environments, *self._gone]

    async def _conversation_claims(self, born_before_ns: int | None) -> list[RetentionClaim]:
        """Return the claims of conversations under way; one whose last call is older than `born_before_ns` has none."""
        groups = OpenGroups(lambda env, lease: True)
        async with self._bus.read(CALLS, [subjects.call(self._settings.run)], headers_only=True, follow=False) as calls:
            async for call in calls:
                groups.apply_message(call)
        if born_before_ns is not None:
            groups.drop_older(born_before_ns)
        return [
            RetentionClaim(CALLS, subjects.call(self._settings.run, env), groups.lowest(env), "conversations under way")
            for env in groups.environments()
        ]

    async def _service_claims(self) -> list[RetentionClaim]:
        """Return the claims of the services, for every trainer that has a ledger here."""
        found = list[RetentionClaim]()
        prefix = subjects.ledger(self._settings.run, "")
        stored = await self._bus.stored_subjects(LEDGER, [f"{prefix}*"])
        trainers = dict.fromkeys([self._settings.trainer, *(subject.removeprefix(prefix) for subject in stored)])
        for trainer in trainers:
            found += await self._claims_of(trainer)
        return found

    async def _claims_of(self, trainer: str) -> list[RetentionClaim]:
        run, revision, bus = self._settings.run, self._settings.revision, self._bus
        readers = Readers(Service(bus, "gc", run, revision), self._settings.readers, self._gone)
        reports = subjects.state(run, "trainer", subjects.LIVE, trainer)
        left_out = await read_skipped(bus)
        async with bus.read(LEDGER, [reports], follow=False) as messages:
            async for message in messages:
                report = await decode_owned(bus, TrainReport, message, lambda one: one.run == run, left_out=left_out)
                if report is not None:
                    readers.untrained_references.record_report(report)
        last, _, _ = await newest_entry(bus, run, trainer)
        position = readers.untrained_references.position
        if last is not None:
            begin = await position_before(bus, run, trainer, position)
            async with aclosing(follow_ledger(bus, run, trainer, begin, follow=False)) as entries:
                async for entry in entries:
                    readers.entry(entry)
            readers.entry(last)
        facts = await readers.facts()
        on_ledger = ledger_claims(
            facts, subjects.ledger(run, trainer), await self._entry_before(run, trainer, position)
        )
        if await bus.last(LEDGER, subjects.offline_trainer(run, trainer)) is not None:  # no batcher writes it
            batches = f"trainer {trainer}, for its batches"
            return [*on_ledger, *(RetentionClaim(stream, ">", seq, batches) for stream, seq in facts.batched.items())]
        return [*retention_floor.claims(facts, run, revision, self._environments()), *on_ledger]

    async def _entry_before(self, run: str, trainer: str, position: int) -> int:
        """Return the sequence of the last entry that a trainer at `position` knows; 1 if it knows none."""
        if not position:
            return 1
        async with self._bus.read(LEDGER, [subjects.ledger(run, trainer)], follow=False) as messages:
            async for message in messages:
                try:
                    index = decode(LedgerEntry, message.data).index
                except SchemaError:
                    continue
                if index >= position - 1:
                    return message.seq
        return 1

    # -- stored messages

    async def _headers(self, stream: str, names: Sequence[str]) -> AsyncGenerator[StoredHeader]:
        """Yield the messages stored on `names`, in order; a large message includes its chunks, which come before it."""
        kind = next((kind for kind, owner in subjects.BLOB_KINDS.items() if owner == stream), None)
        blobs = [subjects.blob(kind, self._settings.run)] if kind else []
        chunks: dict[str, int] = {}
        filters = list(dict.fromkeys([*names, *blobs]))
        async with self._bus.read(stream, filters, headers_only=True, follow=False) as messages:
            async for message in messages:
                given = message.headers.get(SIZE_HEADER, "")
                size = int(given) if given.isdecimal() else 0
                size += (
                    _OVERHEAD_BYTES
                    + len(message.subject)
                    + sum(len(k) + len(v) + 4 for k, v in message.headers.items())
                )
                if message.subject.startswith("rl.blob."):
                    chunks[message.subject] = chunks.get(message.subject, 0) + size
                    continue
                size += chunks.pop(message.headers.get(LARGE_HEADER, ""), 0)
                yield StoredHeader(message.seq, message.subject, message.time_ns, size)

    async def _measure(self, stream: str, names: Sequence[str]) -> tuple[int, int, dict[str, int]]:
        messages, size, lasts = 0, 0, dict[str, int]()
        if names:
            async with aclosing(self._headers(stream, names)) as headers:
                async for header in headers:
                    messages, size = messages + 1, size + header.size
                    lasts[header.subject] = header.seq
        return messages, size, lasts

    async def _decide(
        self,
        stream: str,
        names: Sequence[str],
        claims: Sequence[RetentionClaim],
        *,
        born: int | None,
        keep: int | None,
        now_ns: int,
    ) -> tuple[tuple[int, int], GcDecision]:
        """Return the number of messages and bytes on `names`, and which of them are deleted."""
        messages, size, lasts = await self._measure(stream, names)
        least_s = self._settings.retention.min_age_s
        decider = GcDecider(
            stream,
            claims,
            lasts,
            born_before_ns=born,
            excess=0 if keep is None else max(0, size - keep),
            kept_from_ns=now_ns - int(least_s * 1e9) if least_s else None,
        )
        if names:
            async with aclosing(self._headers(stream, names)) as headers:
                async for header in headers:
                    if not decider.decide_message(header):
                        break
        return (messages, size), decider.decision

    async def _agree(self, stream: str, before: dict[str, int]) -> dict[str, int]:
        """Record what may be gone, except what was held meanwhile, and return it."""
        now_ns = await self._bus.server_time_ns()
        agreed: dict[str, int] = {}

        def update(old: Retention) -> Retention:
            agreed.clear()
            holds = old.standing(now_ns)
            held = [claim.needs for claim in retention_floor.hold_claims(holds) if claim.stream == stream]
            agreed.update({subject: min([limit, *held]) for subject, limit in before.items()})
            reached = max(old.trimmed.get(stream, 1), *agreed.values())
            # the owner of a lapsed hold learns of it, as it does from the governor
            return old.replace(holds=holds, trimmed={**old.trimmed, stream: reached})

        await update_record(self._bus, self._settings.run, update)
        return agreed

    async def _revisions(self, holds: Collection[Hold], trainers: Collection[OfflineTrainer]) -> list[StoredRevision]:
        run, found = self._settings.run, dict[str, StoredRevision]()
        filters = [subjects.revision(run), subjects.replay("rescore", run, "*")]
        async with aclosing(self._headers(REPLAY, filters)) as headers:
            async for header in headers:
                name = header.subject.split(".")[-2]
                old = found.get(name) or StoredRevision(
                    name, 0, 0, 0, self._worker(name, holds) or _trainer_of(name, trainers)
                )
                found[name] = old._replace(
                    messages=old.messages + 1, bytes=old.bytes + header.size, newest_ns=header.time_ns
                )
        return sorted(found.values(), key=lambda one: one.newest_ns)

    def _worker(self, name: str, holds: Collection[Hold]) -> str | None:
        if name == self._settings.revision:
            return "the live run, whose revision it is"
        return _user(name, holds)

    async def _trainers(self, holds: Collection[Hold]) -> list[OfflineTrainer]:
        """Return the offline trainers, without measuring their size."""
        bus, run, found = self._bus, self._settings.run, list[OfflineTrainer]()
        for subject in await bus.stored_subjects(LEDGER, [subjects.offline_trainer(run, "*")]):
            name = subject.rsplit(".", 1)[-1]
            record, _, _ = await read_last_event(bus, LEDGER, subject, OfflineTrainerRecord, lambda one: one.run == run)
            reports = subjects.state(run, "trainer", subjects.LIVE, name)
            report, _, _ = await read_last_event(bus, LEDGER, reports, TrainReport, lambda one: one.run == run)
            if record is not None:
                trained = report.next_batch if report else 0
                works = any(hold.about == f"train {name} on {record.revision}" for hold in holds)
                found.append(OfflineTrainer(name, record.revision, trained, record.batches, 0, 0, works))
        return found

    async def _measured(self, trainer: OfflineTrainer) -> OfflineTrainer:
        messages, size, _ = await self._measure(LEDGER, _of_trainer(self._settings.run, trainer.name))
        return trainer._replace(messages=messages, bytes=size)

    async def check_unread(self) -> None:
        """Raise `ConfigError` if any of the run's history is held."""
        run = self._settings.run
        now_ns = await self._bus.server_time_ns()
        held = (await read_record(self._bus, run)).standing(now_ns)
        if held:
            name, hold = next(iter(held.items()))
            raise ConfigError(f"run {run} is still read by {name} ({hold.about}): end that first")


def _is_environment(name: str) -> bool:
    """Whether an environment can have the name; no reader waits for subjects with other names."""
    try:
        subjects.check_name("environment", name)
    except ConfigError:
        log.warning("%r in a subject is no environment's name: what is stored there is passed over", name[:80])
        return False
    return True


def _of_trainer(run: str, name: str) -> list[str]:
    """Return the subjects of an offline trainer in the order of deletion; the one that defines it is last."""
    return [
        subjects.state(run, "trainer", subjects.LIVE, name),
        subjects.ledger(run, name),
        subjects.offline_trainer(run, name),
    ]


def _trainer_of(revision: str, trainers: Collection[OfflineTrainer]) -> str | None:
    """Return a trainer that still has batches of a revision to train on, and so needs it at every start."""
    return next((needs for one in trainers if one.revision == revision and (needs := one.needs)), None)


def _user(revision: str, holds: Collection[Hold]) -> str | None:
    """Return which process writes or reads a revision, according to its hold."""
    use = re.compile(rf"(replay|shadow) {revision}|train \S+ on {revision}|export of {revision} to .*", re.DOTALL)
    return next((hold.about for hold in holds if use.fullmatch(hold.about)), None)
