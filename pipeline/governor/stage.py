"""Runs the governor as a service.

It knows every rollout and every outcome, and answers requests for leases.

It fails closed: it serves only once it has caught up with the log, and after a restart it grants only when every lease
that an earlier life may have granted has run out or was renewed. A lease ends unused only once the log was read beyond
its end. A run has one governor: its term is written to the log, and a later term ends it.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from pathlib import Path

import anyio

from lachesis.pipeline.bus.api import Bus, StoredMessage, StreamUsage
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.disk_room import KEEP_FREE_BYTES
from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.common.disk import disk_room
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import DamagedError, FencedError, InfrastructureError, NotFoundError
from lachesis.pipeline.governor.left_behind import LeftBehind
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.governor.settings import GovernorSettings
from lachesis.pipeline.health.environment_status import EnvironmentStatuses, halted_reason
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry, position_before
from lachesis.pipeline.retention.budget import MEASURED_STREAMS
from lachesis.pipeline.retention.trimming import HistoryTrimmer
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.runtime.lost_streams import StreamWatch, find_streams, refuse_lost_streams
from lachesis.pipeline.runtime.peer_acknowledgements import PeerAcknowledgements
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.store_marks import EndWatch, refuse_lost_ends
from lachesis.pipeline.runtime.stream_marks import describe_lost_bytes
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.calls import TakeUpReply, TakeUpRequest
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest, PolicyRecord, StateSnapshot
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.subjects import stream_name

__all__ = ["check_term", "run_governor"]

_REQUESTS_AT_ONCE = 16
"""Of one environment; see `_WaitingRequests`."""
_MAX_WAITING = 12
"""Of those, requests that wait for room: the others renew and release leases meanwhile."""
_MAX_WAIT_S = 2.0
"""A request whose producer has died meanwhile may be granted: a group's lease is lost then, until it runs out."""
_GATHER_S = 0.01
"""Seconds after a change until requests that wait are answered again: changes come many at a time."""
_SOON_S = 0.001
"""After which a producer may ask again whose request has waited already."""
_USAGE_S = 1.0
"""Seconds between two measurements of the streams."""
_PEER_HINT = (
    "look at the log of the service, and of the server whose store lost its end. If messages are lost, stop the run: "
    "`lachesis runs recover` says what is known of it where the run's folder is"
)


async def run_governor(service: Service, settings: GovernorSettings) -> None:
    """Grant leases until the service drains. Raises `FencedError` when a later governor takes over."""
    await refuse_lost_streams(service)
    await _check_store(service, settings.folder)
    term = await _Term.acquire(service)
    waits = math.inf if term.has_predecessor else -math.inf
    governor = Governor(
        settings.flow, settings.batching, term=service.instance, grants_from_s=waits, steps=settings.steps
    )
    follower = _Follower(service, settings, governor)
    await follower.catch_up()
    waiting = _WaitingRequests(governor, settings.flow.retry_s, follower.publish_status)

    async def answer(env: str, data: bytes) -> bytes:
        try:
            request = decode(LeaseRequest, data)
        except SchemaError as error:
            return encode(LeaseReply(granted=False, reason=str(error)))
        if request.env != env:  # only the key of this environment permits requests on this subject
            return encode(LeaseReply(granted=False, reason=f"{request.env} has a lease subject of its own"))
        was_blocked = governor.blocked
        reply = governor.answer_request(request, time.monotonic())
        if governor.blocked and not was_blocked:  # the batcher waits for this status
            await follower.publish_status()
        if request.op == "acquire" and not reply.granted:
            reply = await waiting.wait(request, reply)
        if request.op == "acquire" and reply.granted:
            reply = reply.replace(left_behind=follower.left.count(env, time.monotonic()))
        return encode(reply)

    async def answer_take_up(env: str, data: bytes) -> bytes:
        request = decode(TakeUpRequest, data)  # its SchemaError is raised at the asking process
        if request.env != env:
            return encode(TakeUpReply())
        return encode(await follower.left.answer(env, request, time.monotonic()))

    async with anyio.create_task_group() as tasks:
        follow = (follower.members, follower.ledger, follower.policy, follower.reports, follower.streams)
        for task in (
            *follow,
            follower.left.follow,
            follower.alerts,
            follower.heartbeats,
            follower.history.run,
            term.watch,
        ):
            tasks.start_soon(task)
        async with AsyncExitStack() as served:
            for env in settings.environments:
                subject = subjects.lease(service.run, env)
                await served.enter_async_context(
                    service.bus.serve(subject, partial(answer, env), at_once=_REQUESTS_AT_ONCE)
                )
                subject = subjects.take_up(service.run, env)
                await served.enter_async_context(service.bus.serve(subject, partial(answer_take_up, env)))
            if term.has_predecessor:  # from now on producers can renew their leases
                governor.wait_until(time.monotonic() + settings.flow.lease_s)
            service.mark_ok()
            await service.draining.wait()
        tasks.cancel_scope.cancel()


class _WaitingRequests:
    """Requests for leases that are refused, and answered only once there is room or their time is up.

    A producer that waits so need not ask again and again, and hears of room at once.
    """

    def __init__(self, governor: Governor, look_s: float, publish_status: Callable[[], Awaitable[None]]) -> None:
        """`look_s`: after so many seconds they are answered again without a change, as time alone may bring room."""
        self._governor = governor
        self._look_s = look_s
        self._publish_status = publish_status
        self._count: Counter[str] = Counter()
        self._changed = anyio.Event()
        governor.on_change = self._note_change

    def _note_change(self) -> None:
        if self._count.total():
            self._changed.set()
            self._changed = anyio.Event()

    async def wait(self, request: LeaseRequest, refusal: LeaseReply) -> LeaseReply:
        """Return the answer once it is no refusal, or `request.wait_s` later; `refusal` where waiting is of no use."""
        reply, until_s = refusal, time.monotonic() + min(request.wait_s, _MAX_WAIT_S)
        if request.wait_s == 0 or self._count[request.env] >= _MAX_WAITING:
            return refusal
        self._count[request.env] += 1
        try:
            while not (reply.granted or reply.never or reply.closed) and (left_s := until_s - time.monotonic()) > 0:
                with anyio.move_on_after(min(left_s, self._look_s)):
                    await self._changed.wait()
                    await anyio.sleep(_GATHER_S)
                was_blocked = self._governor.blocked
                reply = self._governor.reconsider(request, time.monotonic())
                if self._governor.blocked and not was_blocked:
                    await self._publish_status()
        finally:
            self._count[request.env] -= 1
        can_wait_on = not (reply.granted or reply.never or reply.closed)
        return reply.replace(retry_s=_SOON_S) if can_wait_on else reply


async def _check_store(service: Service, folder: Path) -> None:
    """Raise `HistoryLostError` if a stream or the bucket went back behind messages that others refer to."""
    check = service.retrying("check that no stream went back")
    await check(refuse_lost_ends, service.bus, service.run, folder=folder)


class _Term:
    """This governor's term: the last message of its state subject."""

    def __init__(self, service: Service, subject: str, seq: int, *, has_predecessor: bool) -> None:
        self._service = service
        self._subject = subject
        self._seq = seq
        self.has_predecessor = has_predecessor

    @classmethod
    async def acquire(cls, service: Service) -> "_Term":
        """Write a new term after the last one."""
        subject = subjects.state(service.run, "governor", service.revision, "0")
        last, seq = await _read_term(service.bus, subject)
        index = last.index + 1 if last else 0
        state = service.instance.encode()
        event = StateSnapshot(
            stage="governor", index=index, covers=0, cursors={}, state=state, sha256=hashlib.sha256(state).digest()
        )
        msg_id = commit_id(f"term.{subject}.{service.instance}")
        seq = await service.bus.commit(subject, encode(event), expected=seq, msg_id=msg_id)
        return cls(service, subject, seq, has_predecessor=last is not None)

    async def watch(self) -> None:
        """Raise `FencedError` once a later term is written."""
        bus = self._service.bus
        left_out = await read_skipped(bus)
        async with bus.read(subjects.LEDGER, [self._subject], start=self._seq + 1) as later:
            async for message in later:
                later_term = await decode_owned(
                    bus, StateSnapshot, message, _is_term, newer="refuse", left_out=left_out
                )
                if later_term is None:
                    continue
                owner = later_term.state.decode(errors="replace")
                raise FencedError(f"governor {owner} has taken over run {self._service.run}")


def _is_term(snapshot: StateSnapshot) -> bool:
    return snapshot.stage == "governor"


async def check_term(bus: Bus, run: str, revision: str) -> None:
    """Raise `VersionError` if the governor would refuse the last term."""
    await _read_term(bus, subjects.state(run, "governor", revision, "0"))


async def _read_term(bus: Bus, subject: str) -> tuple[StateSnapshot | None, int]:
    last, _, seq = await read_last_event(bus, subjects.LEDGER, subject, StateSnapshot, _is_term, newer="refuse")
    return last, seq


class _Follower:
    """Feeds the governor from the log."""

    def __init__(self, service: Service, settings: GovernorSettings, governor: Governor) -> None:
        self.service = service
        self.governor = governor
        self.trainer = settings.trainer
        self.report_subject = subjects.state(service.run, "trainer", subjects.LIVE, self.trainer)
        self.store = settings.store
        self.left = LeftBehind(service, governor)
        self.history = HistoryTrimmer(service, settings.history, governor.budget, self.left.groups)
        self.readers = self.history.readers
        self.rollouts = [subjects.rollout(service.run)]
        self.next_rollout = 1
        self.environments = list(settings.environments)
        self.standings = EnvironmentStatuses()
        self.position = LedgerPosition()
        self.next_report = 1
        self.lost: dict[str, int] = {}  # bytes by stream that the server could not read when it started
        self.ends = EndWatch(service.bus, service.run, settings.folder)
        self.newest: StreamMark | None = None  # the newest rollout read
        self.peers = PeerAcknowledgements()

    async def catch_up(self) -> None:
        """Read everything that is stored now: the last entry is the whole state of the ledger."""
        bus = self.service.bus
        async with bus.read(subjects.LEDGER, [self.report_subject], follow=False) as reports:
            async for message in reports:
                self._report(message)
        last, _, _ = await newest_entry(bus, self.service.run, self.trainer)
        if last is not None:
            await self._take_up_untrained()
            self.readers.entry(last)
            self.governor.entry(last)
            self.position = LedgerPosition(last.index + 1, last.digest())
            self.next_rollout = last.watermark + 1
        await self.standings.read(bus, self.service.run, self.service.revision, self.environments)
        for env in self.standings.environments:
            self._heed(env)
        try:
            policy = await bus.value(keys.POLICY)
        except DamagedError as error:  # as if no step were taken, which grants less, until the trainer's next record
            self.service.set_problem("policy", str(error))
        else:
            if policy is not None:
                self._trained(policy.value)
        asked_s = time.monotonic()
        self._measure(await find_streams(bus), asked_s)
        await self.left.catch_up()  # before the rollouts, which may be of its groups
        await self._read_members()

    async def _read_members(self) -> None:
        """Read the rollouts that are stored now."""
        async with self.service.bus.read(
            subjects.ROLLOUTS, self.rollouts, start=self.next_rollout, headers_only=True, follow=False
        ) as stored:
            async for message in stored:
                self._member(message)

    async def _take_up_untrained(self) -> None:
        """Apply the entries that a trainer may train on again, one by one: without any report, all of them."""
        bus, run = self.service.bus, self.service.run
        begin = await position_before(bus, run, self.trainer, self.readers.untrained_references.position)
        async with aclosing(follow_ledger(bus, run, self.trainer, begin, follow=False)) as entries:
            async for entry in entries:
                self.readers.entry(entry)

    async def members(self) -> None:
        async with self.service.bus.read(
            subjects.ROLLOUTS, self.rollouts, start=self.next_rollout, headers_only=True
        ) as stored:
            async for message in stored:
                self._member(message)

    def _member(self, message: StoredMessage) -> None:
        self.next_rollout = max(self.next_rollout, message.seq + 1)
        if self.newest is None or message.seq > self.newest.seq:
            self.newest = StreamMark(message.seq, message.time_ns)
        try:
            plan = Plan.unpack(message.headers.get(PLAN_HEADER))
        except SchemaError:
            self.governor.record_unreadable(message.seq)
        else:
            env = message.subject.rsplit(".", 1)[-1]
            self.governor.member(message.seq, env, plan, time.monotonic())
            self.left.groups.settle(env, plan.group)

    async def ledger(self) -> None:
        followed = follow_ledger(self.service.bus, self.service.run, self.trainer, self.position)
        async with aclosing(followed) as entries:
            async for entry in entries:
                self.governor.entry(entry)
                self.readers.entry(entry)

    async def reports(self) -> None:
        async with self.service.bus.read(subjects.LEDGER, [self.report_subject], start=self.next_report) as reports:
            async for message in reports:
                self._report(message)

    def _report(self, message: StoredMessage) -> None:
        self.next_report = message.seq + 1
        try:
            report = decode(TrainReport, message.data)
        except SchemaError as error:  # history is kept as if the report had not been made
            self.service.set_problem("report", f"a trainer's report cannot be read: {error}")
        else:
            self.service.set_problem("report", None)
            self.readers.untrained_references.record_report(report)

    async def policy(self) -> None:
        async with self.service.bus.watch(keys.POLICY) as records:
            async for record in records:
                self._trained(record.value)

    def _trained(self, record: bytes) -> None:
        try:
            step = decode(PolicyRecord, record).policy_version.step
        except SchemaError as error:  # it does not count as trained; the next one corrects that
            self.service.set_problem("policy", f"the policy record cannot be read: {error}")
        else:
            self.service.set_problem("policy", None)
            self.governor.trained(step)

    async def alerts(self) -> None:
        """Follow the standing of the environments: nothing is granted to a halted one."""
        subject = subjects.event("alert", self.service.run, self.service.revision)
        async with self.service.bus.read(subjects.EVENTS, [subject], start=self.standings.last_seq + 1) as alerts:
            async for message in alerts:
                env = await self.standings.apply_alert(self.service.bus, message)
                if env is not None:
                    self._heed(env)

    def _heed(self, env: str) -> None:
        self.governor.halt(env, halted_reason(env, self.standings.of(env)))

    async def heartbeats(self) -> None:
        async with aclosing(listen_to_heartbeats(self.service.bus, self.service.run)) as beats:
            async for beat in beats:
                self.peers.hear(beat, time.monotonic())

    async def streams(self) -> None:
        """Once a second, measure the streams for everything that needs their ends, and let leases run out."""
        watch = await StreamWatch.open(self.service)
        while True:
            try:
                await self.ends.read_acknowledged()  # before the streams, so that those go at least as far
                asked_s, found = time.monotonic(), await find_streams(self.service.bus)
                watch.check(found)
                self._measure(found, asked_s)
                await self._let_run_out()
                self.service.set_problem("sizes", None)
            except (InfrastructureError, NotFoundError) as error:  # nothing is granted without them
                self.service.set_problem("sizes", f"stream sizes unknown: {error}")
            else:
                await self._mark_ends(found, asked_s)
            self.show()
            await self.publish_status()
            await sleep_until_tick(_USAGE_S)

    async def _mark_ends(self, found: Mapping[str, StreamUsage], asked_s: float) -> None:
        """Write the ends of the streams, unless one went back. Raises `HistoryLostError` if one did."""
        lost = self.peers.describe_lost(found, asked_s)
        self.service.set_problem("acknowledged", lost, mend=_PEER_HINT)
        try:
            await self.ends.update(found, self.newest)
            self.service.set_problem("marks", None)
        except (InfrastructureError, NotFoundError, SchemaError) as error:
            self.service.set_problem("marks", f"how far the streams go was not written down: {error}")

    def _measure(self, found: Mapping[str, StreamUsage], asked_s: float) -> None:
        """Pass the sizes of the streams, and the free space on their disk, to the governor.

        Raises `NotFoundError` if one of the streams does not exist.
        """
        missing = [name for name in MEASURED_STREAMS if name not in found]
        if missing:
            raise NotFoundError(f"there is no {' and no '.join(stream_name(self.service.run, one) for one in missing)}")
        usage = {name: found[name] for name in MEASURED_STREAMS}
        self.governor.budget.disk_bytes = None if self.store is None else _disk_bytes(self.store)
        self.governor.usage(usage, asked_s)
        self.lost = {name: one.lost_bytes for name, one in usage.items() if one.lost_bytes}
        self.service.set_problem("store", describe_lost_bytes(self.lost))
        self.governor.record_contact(time.monotonic())

    async def _let_run_out(self) -> None:
        """End the expired leases under which nothing is stored, as only the log shows."""
        now_s = time.monotonic()
        if self.governor.is_due(now_s):
            await self._read_members()
            self.governor.mark_seen_until(now_s)

    async def publish_status(self) -> None:
        """Publish whether anything more can be admitted. If a message is lost, the next one follows."""
        status = self.governor.status(self.service.run)
        with suppress(InfrastructureError):
            await self.service.bus.broadcast(subjects.admission(self.service.run), encode(status))

    def show(self) -> None:
        """Put the newest figures into the heartbeat."""
        lost = {f"flow/lost_bytes/{stream}": float(size) for stream, size in self.lost.items()}
        self.service.vitals.metrics = self.governor.metrics() | self.history.metrics | lost


def _disk_bytes(store: Path) -> int | None:
    """Return the bytes that may still be stored on the disk under the streams; None: not known."""
    room = disk_room(store)
    return max(0, room.free_bytes - KEEP_FREE_BYTES) if room.total_bytes else None
