"""Puts dead-lettered messages back, so that the run treats each of them once.

Each message that a dead letter names is either stored again or left alone, with the reason. Guarantees that nothing
counts twice:

* A rollout comes back as another rollout: the same samples under an id, producer and counter of their own, with a note
  of their origin, admitted under a lease as any other. It qualifies only if its recorded outcome is dead and no reward
  was ever derived from it, which is known only as long as no event stored after it was trimmed. The old outcome stands,
  and the new rollout gets one of its own.
* An annotation comes back as it was. Of several for one group the first stored counts, so it changes nothing where
  another has come meanwhile. Commits of stateful stages never come back: their order is their meaning.
* What is put back names what it repeats in a header, and that is looked for first: done twice, it is done once.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.last_event import decode_owned
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.pipeline.retention.holds import read_record as retention_record
from lachesis.pipeline.runtime.dead_letters import REQUEUED_HEADER
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, RewardEvent
from lachesis.schemas.catalog import channel_of
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["RequeueCase", "Requeuer", "examine"]

_PRODUCER = "requeue"
_KINDS_OF_ONE_GROUP = frozenset({"score", "teacher", "eval"})
"""Annotations of which the first stored counts, and that no writer chains."""
_LEASE_ALLOWANCE = 4096
_MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class RequeueCase:
    """One dead-lettered message: `letter` is its newest letter, stored at `seq` of EVENTS.

    `refusal` says why it is left alone, `done` at which sequence it was put back already; with neither, it qualifies.
    `stale`: it is too old by now, so its outcome will be stale.
    """

    seq: int
    letter: DeadLetter
    message: StoredMessage | None = None
    refusal: str | None = None
    done: int | None = None
    stale: bool = False

    @property
    def qualifies(self) -> bool:
        return self.refusal is None and self.done is None


async def examine(bus: Bus, config: RunConfig, letters: Iterable[tuple[int, DeadLetter]]) -> list[RequeueCase]:
    """Return one case a message, by the sequence of its newest letter.

    Reads the ledger and what was derived.
    """
    newest = {(letter.stream, letter.seq): (seq, letter) for seq, letter in letters}
    rollouts = {seq for stream, seq in newest if stream == subjects.ROLLOUTS}
    record = await _RequeueRecord.load(bus, config) if rollouts else _RequeueRecord()
    rewarded = await _rewarded(bus, config, {letter.env for _, letter in newest.values()}) if rollouts else set()
    kept_ns = await _events_kept_from_ns(bus, config.run) if rollouts else None  # after the rewards were read
    done = await _put_back(bus, config.run)
    cases = []
    for (stream, at), (seq, letter) in newest.items():
        try:
            message = await bus.get(stream, at) if stream in {subjects.ROLLOUTS, subjects.EVENTS} else None
        except (NotFoundError, DataError) as error:
            cases.append(RequeueCase(seq, letter, refusal=str(error)))
            continue
        if stream == subjects.ROLLOUTS and message is not None:
            refusal = record.unlike_dead(at) or _unfit_rollout(message, rewarded, kept_ns)
        elif message is not None:
            refusal = _unfit_annotation(message)
        else:
            refusal = f"messages of {stream} are not put back"
        repeated = None if message is None else done.get((message.subject, _name(stream, at)))
        case = RequeueCase(seq, letter, message, refusal, repeated)
        if case.qualifies and stream == subjects.ROLLOUTS and message is not None:
            step = config.batching.step_of(Plan.of(decode(RolloutGroup, message.data)))
            case = replace(case, stale=record.next_batch - step > config.batching.max_staleness)
        cases.append(case)
    return sorted(cases, key=lambda case: case.seq)


class Requeuer:
    """Stores cases again. `service` speaks to the governor; nothing is stored without its lease."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._epoch = time.time_ns()
        self._counter = 0

    async def requeue_case(self, case: RequeueCase) -> int:
        """Store the message of a case that qualifies and return its new sequence.

        Waits for a lease without bound.
        """
        if case.message is None:
            raise ValueError(f"letter {case.seq} does not qualify: {case.refusal}")
        if case.letter.stream == subjects.ROLLOUTS:
            return await self._rollout(case, case.message)
        headers = {name: text for name, text in case.message.headers.items() if name != MSG_ID_HEADER}
        return await self._store(case, case.message.subject, case.message.data, headers)

    async def _rollout(self, case: RequeueCase, message: StoredMessage) -> int:
        old = decode(RolloutGroup, message.data)
        letter = case.letter
        note = {
            "letter": case.seq,
            "rollout": message.seq,
            "group": old.id,
            "reason": letter.reason[:_MAX_REASON_CHARS],
        }
        group = old.replace(
            id=new_group_id(),
            producer=_PRODUCER,
            epoch=self._epoch,
            counter=self._counter,
            metadata={**old.metadata, "requeued": note},
        )
        leases = ProducerLeases(self._service, _PRODUCER, group.env)
        lease = await leases.acquire(group.sequences.n_samples, len(message.data) + _LEASE_ALLOWANCE)
        if lease is None:
            raise InfrastructureError(f"letter {case.seq}: interrupted before it was admitted")
        group = group.replace(lease=lease)
        headers = {PLAN_HEADER: Plan.of(group).pack(), TRACEPARENT_HEADER: traceparent(group.id, sampled=False)}
        self._counter += 1
        return await self._store(case, message.subject, encode(group), headers)

    async def _store(self, case: RequeueCase, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        name, stream = _name(case.letter.stream, case.letter.seq), case.letter.stream
        msg_id = f"requeue.{self._service.run}.{name}"
        while True:
            ack = await self._service.bus.publish_large(
                subject, data, msg_id=msg_id, headers={**headers, REQUEUED_HEADER: name}
            )
            if not ack.duplicate or not await self._is_another(stream, ack.seq, subject):
                return ack.seq
            msg_id = f"{msg_id}.after.{ack.seq}"

    async def _is_another(self, stream: str, seq: int, subject: str) -> bool:
        """Return whether somebody has used the message's id on another subject, which would keep it out for good."""
        try:
            return (await self._service.bus.get_head(stream, seq)).subject != subject
        except NotFoundError:
            return False  # it was put back before, and is trimmed


def _name(stream: str, seq: int) -> str:
    return f"{stream}.{seq}"


@dataclass(slots=True)
class _RequeueRecord:
    """What the ledger says: outcomes by sequence of ROLLOUTS, and what was settled in entries that are gone."""

    outcomes: dict[int, str] = field(default_factory=dict)
    resolved: ResolvedSet = field(default_factory=ResolvedSet)
    next_batch: int = 0

    @classmethod
    async def load(cls, bus: Bus, config: RunConfig) -> Self:
        record, follows = cls(), 0

        def is_next(entry: LedgerEntry) -> bool:
            return (entry.run, entry.trainer) == (config.run, config.training.name) and entry.index >= follows

        subject = subjects.ledger(config.run, config.training.name)
        left_out = await read_skipped(bus)
        async with bus.read(subjects.LEDGER, [subject], follow=False) as entries:
            async for message in entries:
                entry = await decode_owned(bus, LedgerEntry, message, is_next, left_out=left_out)
                if entry is None:
                    continue
                follows = entry.index + 1
                record.resolved = ResolvedSet(entry.watermark, entry.resolved)
                record.next_batch = entry.next_batch
                record.outcomes.update({ref.seq: "batched" for ref in (entry.batch.groups if entry.batch else ())})
                record.outcomes.update({outcome.seq: outcome.kind for outcome in entry.outcomes})
        return record

    def unlike_dead(self, seq: int) -> str | None:
        """Return why the rollout at `seq` did not end as dead, None if it did."""
        outcome = self.outcomes.get(seq)
        if outcome == "dead":
            return None
        if outcome is not None:
            return f"its outcome is {outcome}, not dead"
        if seq in self.resolved:
            return "its outcome is recorded, but the entry is gone from the ledger"
        return "it has no outcome yet: it may still be scored and batched"


async def _rewarded(bus: Bus, config: RunConfig, envs: set[str]) -> set[str]:
    """Return the groups of some environments whose rewards are stored, and thus in their statistics."""
    found: set[str] = set()
    filters = [subjects.event("reward", config.run, config.revision, env) for env in sorted(envs)]
    async with bus.read(subjects.EVENTS, filters, follow=False) as messages:
        async for message in messages:
            try:
                found.update(item.group for item in decode(RewardEvent, message.data).groups)
            except SchemaError:
                continue  # no reader took it either
    return found


async def _events_kept_from_ns(bus: Bus, run: str) -> int | None:
    """Return a server time after which no event of the run was trimmed; None: none ever was.

    All that may be gone lies below one sequence, so it is no younger than what is stored from there on.
    """
    trimmed = (await retention_record(bus, run)).trimmed.get(subjects.EVENTS, 1)
    if trimmed <= 1:
        return None
    everything = subjects.stream_subjects(run)[subjects.EVENTS]
    async with bus.read(subjects.EVENTS, everything, start=trimmed, headers_only=True, follow=False) as messages:
        async for message in messages:
            return message.time_ns
    return await bus.server_time_ns()


async def _put_back(bus: Bus, run: str) -> dict[tuple[str, str], int]:
    """Return by subject and name of what was repeated where its repetition is stored.

    On another subject there is none: any environment may name in its own messages what it likes.
    """
    found: dict[tuple[str, str], int] = {}
    alike = [subjects.event(kind, run, "*") for kind in ("score", "teacher", "eval")]
    for stream, filters in ((subjects.ROLLOUTS, [subjects.rollout(run)]), (subjects.EVENTS, alike)):
        async with bus.read(stream, filters, headers_only=True, follow=False) as messages:
            async for message in messages:
                name = message.headers.get(REQUEUED_HEADER)
                if name is not None:
                    found[message.subject, name] = message.seq
    return found


def _unfit_rollout(message: StoredMessage, rewarded: set[str], kept_ns: int | None) -> str | None:
    try:
        group = decode(RolloutGroup, message.data)
    except SchemaError as error:
        return f"it still cannot be read: {error}"
    if message.subject != subjects.rollout(group.run, group.env):
        return f"it claims run {group.run[:40]!r}, env {group.env[:40]!r}, but lies on {message.subject}"
    if group.id in rewarded:
        return "it was rewarded as well, so its scores are in the statistics already"
    if kept_ns is not None and message.time_ns <= kept_ns:
        return "events stored after it were trimmed: it is no longer known whether it was rewarded as well"
    return None


def _unfit_annotation(message: StoredMessage) -> str | None:
    channel = channel_of(message.subject)
    if channel is None or channel.name not in _KINDS_OF_ONE_GROUP:
        return f"messages on {message.subject} are not put back: they are commits of one writer, or letters"
    try:
        decode(channel.events[0], message.data)
    except SchemaError as error:
        return f"it still cannot be read: {error}"
    return None
