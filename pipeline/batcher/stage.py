"""Runs the batcher: reads rollouts and annotations, and writes ledger entries.

It is the single writer of one trainer's ledger. It reads headers of ROLLOUTS; rewards, teacher pointers and dead
letters of the run's revision from EVENTS; and promotions. The ledger records from which rollout on a promoted revision
counts. It writes one fenced message for each entry. An entry is written at once when a batch is ready; other outcomes
share an entry once there is nothing more to read, or once they are many. Nothing is kept outside the ledger: a start
reads the last entry, and the streams from the positions in it.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.entry_former import GROUPS_PER_SELECTION, MAX_OUTCOMES_PER_ENTRY, EntryFormer
from lachesis.pipeline.batcher.join import Joiner, PendingRollout, Wanted
from lachesis.pipeline.batcher.lengths import RecentLengths, stale_lengths
from lachesis.pipeline.batcher.settings import BatcherSettings
from lachesis.pipeline.batcher.traces import StoredEntry, trace_entry
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.health.environment_status import EnvironmentStatuses
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, Chain
from lachesis.pipeline.ledger.ledger_end import read_ledger_end
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.promotion import record as promotion
from lachesis.pipeline.promotion.logic import decide, publish_decision
from lachesis.pipeline.runtime.dead_letters import count_dead, dead_letter, dead_letter_at, publish_dead_letter
from lachesis.pipeline.runtime.incidents import follow_incidents
from lachesis.pipeline.runtime.inputs import InputSource, open_bursts, read_to_end
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stream_marks import MARKS_HEADER, StreamMarks
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupReward, RewardEvent, Stamp, TeacherEvent, TeacherPointer
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import AdmissionStatus
from lachesis.schemas.errors import DataError, SchemaError, VersionError
from lachesis.schemas.ids import is_of_other_epochs
from lachesis.schemas.ledger import GroupRef, LedgerEntry, OutcomeKind
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

__all__ = ["run_batcher"]

log = logging.getLogger("lachesis")

_MAX_ENTRY_BYTES_WITH_STAMPS = 4 << 20
"""Bytes of an entry beyond which its stamps are left out; only traces need them."""
_MAX_WAITING_LETTERS = 1024
"""Dead letters waiting to be stored."""


async def run_batcher(service: Service, settings: BatcherSettings) -> None:
    """Write the ledger of the run's trainer until the service drains.

    Raises `FencedError` when another batcher writes it.
    """
    try:
        await _write_ledger(service, settings)
    except* InfrastructureError:
        if not service.draining.is_set():  # else the next start writes the rest
            raise


async def _write_ledger(service: Service, settings: BatcherSettings) -> None:
    batcher = await _Batcher.open(service, settings)
    letters_out, letters = anyio.create_memory_object_stream[DeadLetter](_MAX_WAITING_LETTERS)
    async with letters_out, anyio.create_task_group() as tasks:
        batcher.letters = letters_out
        tasks.start_soon(_publish_letters, service, letters)
        async with open_bursts(service, batcher.sources(), most=GROUPS_PER_SELECTION) as bursts:
            tasks.start_soon(batcher.watch_deadlines)
            tasks.start_soon(batcher.watch_governor)
            tasks.start_soon(batcher.watch_promotions)
            tasks.start_soon(follow_incidents, service)
            service.mark_ok()
            async for burst in bursts:
                await batcher.process_burst(burst)
        tasks.cancel_scope.cancel()


async def _publish_letters(service: Service, letters: MemoryObjectReceiveStream[DeadLetter]) -> None:
    """Store dead letters in a task of its own: a full EVENTS must not delay the outcomes that make room in it."""
    async with letters:
        async for letter in letters:
            async for attempt in service.retrying("publish a dead letter"):
                with attempt:
                    await publish_dead_letter(service, letter)
            count_dead(service, letter)
            service.mark_ok()


class _Batcher:
    """The joiner and the chain, fed and written.

    `entry_seq` is where the newest entry is stored; `seq` is the subject's last sequence, which is the same unless
    another process has published there.
    """

    def __init__(
        self,
        service: Service,
        config: BatchingConfig,
        advantage: AdvantageConfig,
        trainer: str,
        *,
        entry: LedgerEntry | None,
        entry_seq: int,
        seq: int,
    ) -> None:
        self.service = service
        self.config = config
        self.advantage = advantage
        self.subject = subjects.ledger(service.run, trainer)
        self.chain = Chain(service.run, trainer, service.instance, entry)
        self.joiner = Joiner(config, entry)
        self.former = EntryFormer(config, self.joiner, self.chain)
        self.standings = EnvironmentStatuses()
        self.lengths = RecentLengths()
        self.entry_seq = entry_seq
        self.seq = seq
        self.letters: anyio.abc.ObjectSendStream[DeadLetter]
        self._next_event = max(1, entry.events_cursor if entry else 1)
        self._lock = anyio.Lock()
        self._earlier_deadline = anyio.Event()
        self._admission: AdmissionStatus | None = None
        self.marks = StreamMarks()
        self.ends_batched = False  # whether rollouts end, for their traces, once they are batched

    @classmethod
    async def open(cls, service: Service, settings: BatcherSettings) -> "_Batcher":
        """Return the writer in the state that the last entry of the ledger describes."""
        batching, trainer = settings.batching, settings.ledger.trainer
        async for attempt in service.retrying("read the ledger"):
            with attempt:
                entry, entry_seq, seq, marks = await read_ledger_end(service.bus, settings.ledger)
        batcher = cls(service, batching, settings.advantage, trainer, entry=entry, entry_seq=entry_seq, seq=seq)
        batcher.ends_batched = settings.ends_batched
        batcher.marks = marks
        async for attempt in service.retrying("read the alerts"):
            with attempt:
                await batcher.standings.read(service.bus, service.run, service.revision, settings.environments)
        for env in batcher.standings.environments:
            batcher.joiner.quarantine(env, batcher.standings.of(env))
        return batcher

    def sources(self) -> list[InputSource]:
        rollouts = [subjects.rollout(self.service.run)]
        return [
            InputSource(subjects.ROLLOUTS, rollouts, self.joiner.frontier + 1, headers_only=True),
            InputSource(subjects.EVENTS, self._events(), self._next_event),
        ]

    def _events(self) -> list[str]:
        run, revision = self.service.run, self.service.revision
        kinds: list[subjects.Kind] = ["reward", "dead", "alert"]
        if self.config.teacher != "off":
            kinds.append("teacher")
        return [subjects.event(kind, run, revision) for kind in kinds]

    # reading

    async def process_burst(self, burst: Sequence[StoredMessage]) -> None:
        """Process a burst of messages and write the resulting entries."""
        async with self._lock:
            before = self.joiner.next_deadline_ns()
            for message in burst:
                await self._process_message(message)
            drained = len(burst) < GROUPS_PER_SELECTION
            if drained and self.joiner.waiting_for_members:
                await self._see_all_members()
            await self._write(drained=drained)
            if self.joiner.next_deadline_ns() != before:
                self._earlier_deadline.set()

    async def _process_message(self, message: StoredMessage) -> None:
        self.marks.record(message)
        if message.stream == subjects.ROLLOUTS:
            self._take_member(message)
            return
        self._next_event = max(self._next_event, message.seq + 1)
        if message.subject.startswith("rl.alert."):
            env = await self.standings.apply_alert(self.service.bus, message)
            if env is not None:
                self.joiner.quarantine(env, self.standings.of(env))
            return
        try:
            items = _annotations(message)
        except DataError as error:
            if isinstance(error, VersionError):
                await confirm_newer(self.service.bus, message, error)
            await self.letters.send(dead_letter(self.service, message, "data", error))
            await self._lose(message)
            return
        for item, first in items:
            if not self._offer(message, item, first):
                await self._see_all_members()
                self._offer(message, item, first)

    def _take_member(self, message: StoredMessage) -> None:
        env = message.subject.rsplit(".", 1)[-1]
        try:
            plan = Plan.unpack(message.headers.get(PLAN_HEADER))
        except SchemaError as error:
            self.joiner.unreadable(message.seq, env, str(error))
            return
        if is_of_other_epochs(plan.producer, env):  # it would make a duplicate of the group at that place
            self.joiner.unreadable(message.seq, env, f"its producer, {plan.producer}, is of another environment")
            return
        self.joiner.member(message.seq, env, plan, message.time_ns, time.monotonic_ns())

    def _offer(self, message: StoredMessage, item: GroupReward | TeacherPointer | DeadLetter, first: int) -> bool:
        match item:
            case GroupReward():
                return self.joiner.reward(message.seq, message.time_ns, item, first)
            case TeacherPointer():
                return self.joiner.teacher(message.seq, message.time_ns, item)
        return self.joiner.dead(message.seq, message.time_ns, item)

    async def _lose(self, message: StoredMessage) -> None:
        """Set a deadline for rollouts that `message` may belong to. The normalizer handles lost scores."""
        kinds: list[Wanted] = ["score", "teacher"] if message.subject.startswith("rl.reward.") else ["teacher"]
        await self._see_all_members()
        self.joiner.lost(message.seq, message.subject.rsplit(".", 1)[-1], time.monotonic_ns(), kinds)

    async def _see_all_members(self) -> None:
        """Read ROLLOUTS to its end: annotations wait for rollouts that were not read yet."""
        rollouts, _ = self.sources()
        await read_to_end(self.service, rollouts, self._process_message)
        self.joiner.end_of_rollouts()

    async def _see_all_annotations(self) -> None:
        """Read EVENTS to its end: annotations that came in time must count even if the reader is behind."""
        _, events = self.sources()
        await read_to_end(self.service, events, self._process_message)

    async def watch_deadlines(self) -> None:
        """Apply deadlines when they are due."""
        while True:
            self._earlier_deadline = anyio.Event()
            due_ns = self.joiner.next_deadline_ns()
            with anyio.move_on_after(None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)):
                await self._earlier_deadline.wait()
                continue
            async with self._lock:
                now_ns = time.monotonic_ns()
                await self._see_all_annotations()
                for member in self.joiner.expire(now_ns):
                    await self.letters.send(self._unscored(member))
                await self._write(drained=True)

    def _unscored(self, member: PendingRollout) -> DeadLetter:
        reason = f"no reward {self.config.score_deadline_s} s after it was seen"
        if "score" in member.lost:
            reason = f"no reward; it may have been in what cannot be read at sequence {member.lost['score']} of EVENTS"
        return dead_letter_at(
            self.service,
            subjects.ROLLOUTS,
            member.seq,
            env=member.env,
            plan=member.plan,
            kind="deadline",
            reason=reason,
        )

    async def watch_governor(self) -> None:
        """Follow the governor's state: whether it can admit more before a batch is formed."""
        async with self.service.bus.listen(subjects.admission(self.service.run)) as messages:
            async for message in messages:
                try:
                    status = decode(AdmissionStatus, message.data)
                except SchemaError:
                    continue  # unreadable; the next one follows in a second
                async with self._lock:
                    self._admission = status
                    if status.blocked:
                        await self._write(drained=True)

    async def watch_promotions(self) -> None:
        """Decide from which rollout on a promoted revision counts; see `promotion.logic`."""
        service = self.service
        subject = subjects.promotion(service.run, service.revision)
        async with service.bus.read(subjects.ROLLOUTS, [subject]) as lists:
            async for message in lists:
                async with self._lock:
                    await self._promote(message.seq)

    async def _promote(self, listed_at: int) -> None:
        service = self.service
        async for attempt in service.retrying("promote a revision"):
            with attempt:
                known, seq = await promotion.read_promotions(service.bus, service.run, service.revision)
                if seq < listed_at:
                    raise InfrastructureError(
                        f"the list of promotions at {listed_at} is not on a server that lags behind"
                    )
        decided = decide(known, self.chain.promoted, seq)
        if decided is not None:
            self.chain.promoted = decided
            await self._append([])
            log.info(
                "revision %s, promoted by %s, scores rollouts from sequence %d on",
                decided.revision, decided.by, decided.first,
            )  # fmt: skip
        decision = publish_decision(service.run, known, self.chain.promoted)
        if decision is not None:
            with suppress(FencedError):  # the operator has written meanwhile, and this loop reads that too
                async for attempt in service.retrying("publish the decision on a promotion"):
                    with attempt:
                        await promotion.write_promotions(service.bus, decision, service.revision, expected=seq)

    # writing

    async def _write(self, *, drained: bool) -> None:
        while True:
            groups = self.former.choose() or (self.former.choose(incomplete=True) if self._is_stuck() else None)
            if groups is None:
                break
            await self._append(groups)
        while self.joiner.unrecorded_outcomes and (
            drained or self.joiner.unrecorded_outcomes >= MAX_OUTCOMES_PER_ENTRY
        ):
            await self._append([])
        self._measure()

    def _is_stuck(self) -> bool:
        """Whether no batch can ever fill: the governor is up to date, can admit nothing, and nothing runs."""
        joiner, status = self.joiner, self._admission
        if status is None or not status.blocked:
            return False
        knows_all = (status.last_rollout, status.last_entry) == (joiner.frontier, self.chain.position.entries - 1)
        return knows_all and not joiner.undecided and not joiner.unrecorded_outcomes

    async def _append(self, groups: Sequence[GroupRef]) -> None:
        """Store the next entry: a batch of `groups`, if there are any, and outcomes that wait to be recorded."""
        start_ns = self.service.now_ns()
        std_floor = self.chain.promoted.std_floor if self.chain.promoted else self.advantage.std_floor
        content = self.former.next_entry_content(groups, std_floor)
        batch, members = content.batch, [*content.batched, *content.settled]
        stamps = {
            member.plan.group: [*member.stamps, self._stamp(member, start_ns)] for member in members if member.plan
        }
        stale = stale_lengths(content.settled)
        self.lengths.record_entry(batch.groups if batch else [], stale)
        entry = self.former.write(content, stamps=stamps, stale=stale, written_ns=self.service.now_ns())
        stored = await self._store(entry)
        self.service.vitals.emitted += len(members)
        trace_entry(self.service, stored, members, start_ns, ends_batched=self.ends_batched)
        if batch is not None:
            self._measure_batch(batch.number, batch.groups)

    async def _store(self, entry: LedgerEntry) -> StoredEntry:
        storing_ns = self.service.now_ns()
        data = encode(entry)
        if len(data) > _MAX_ENTRY_BYTES_WITH_STAMPS:
            data = encode(entry.replace(stamps={}))
        async for attempt in self.service.retrying("write the ledger"):
            with attempt:
                self.seq = await self.service.bus.commit(
                    self.subject,
                    data,
                    expected=self.seq,
                    msg_id=commit_id(f"{self.subject}.{entry.term}.{entry.index}"),
                    headers={PREVIOUS_HEADER: str(self.entry_seq), MARKS_HEADER: self.marks.to_header()},
                )
        self.entry_seq = self.seq
        self.service.mark_ok()
        return StoredEntry(entry, self.seq, len(data), (storing_ns, self.service.now_ns()))

    # figures

    def _stamp(self, member: PendingRollout, start_ns: int) -> Stamp:
        stored_ns = member.annotated_ns or member.stored_ns or start_ns
        stamp = Stamp(self.service.name, stored_ns, start_ns, self.service.now_ns())
        group = member.plan.group if member.plan else None
        self.service.vitals.done(stamp, traced=group if group and self.service.tracing.sampled(group) else None)
        return stamp

    def _measure(self) -> None:
        totals = self.chain.totals
        batched = totals.get("batched_sequences", 0)
        figures = {
            "batching/batches": self.chain.next_batch,
            "batching/open_sequences": self.joiner.open_sequences,
            "batching/ready_groups": len(self.joiner.ready),
            "batching/oversampling": totals.get("sequences", 0) / batched if batched else None,
            "staleness/bound": self.config.max_staleness,
            **{f"batching/outcomes/{kind}": totals[kind] for kind in get_args(OutcomeKind) if kind in totals},
        }
        self.service.vitals.lag = self.joiner.undecided
        self.service.vitals.metrics.update({name: value for name, value in figures.items() if value is not None})
        self.service.vitals.metrics |= self.lengths.figures()

    def _measure_batch(self, number: int, groups: Sequence[GroupRef]) -> None:
        staleness = [number - self.config.step_of(ref) for ref in groups]  # as staleness/bound counts
        self.service.vitals.metrics |= {
            "staleness/mean": sum(staleness) / len(staleness),
            "staleness/max": max(staleness),
        }


def _annotations(message: StoredMessage) -> Sequence[tuple[GroupReward | TeacherPointer | DeadLetter, int]]:
    """Return the annotations in an EVENTS message, each with the sequence from which it counts.

    Raises `SchemaError`.
    """
    match message.subject.split(".")[1]:
        case "reward":
            event = decode(RewardEvent, message.data)
            return [(item, event.promoted or 1) for item in event.groups]
        case "teacher":
            return [(item, 1) for item in decode(TeacherEvent, message.data).groups]
    return [(decode(DeadLetter, message.data), 1)]
