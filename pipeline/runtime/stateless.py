"""Runs stateless stages: competing consumers of rollouts, each turning a group into an annotation.

Reads rollout groups from the durable consumer that all replicas share. Writes annotation messages, each with every
group that was ready when it left (it does not linger if only one is). Guarantees:

* a group is acknowledged only once its annotation, or its dead letter, is stored;
* held groups are kept alive (`in_progress`); on drain those not begun are given back at once, and the rest are
  finished;
* a bad group (`DataError`) becomes a dead letter at once; a failing dependency (`InfrastructureError`) is retried for
  as long as it fails and never becomes a result. A stage with `patience_s` gives the group back after that time: it is
  delivered again, to any replica, and later groups are not held up;
* any other exception is a bug and ends the service; a group that kills its handler becomes a dead letter after
  `max_attempts` such ends, counted in a durable record. (A process killed while it handles a group for the first time
  is not on record, nor one killed after a dependency failed.) Suspects are handled one at a time, so that their
  neighbours are not blamed with them.
"""

import hashlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from lachesis.pipeline.bus.api import Delivery, PubAck
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.runtime.dead_letters import count_dead, dead_letter, publish_dead_letter
from lachesis.pipeline.runtime.delivery_attempts import DeliveryAttempts
from lachesis.pipeline.runtime.incidents import announce_incident
from lachesis.pipeline.runtime.retries import OUTAGE_POLICY
from lachesis.pipeline.runtime.rollouts import StoredRollout, read_rollout
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.traces import StageTraces
from lachesis.pipeline.telemetry.spans import Span
from lachesis.pipeline.telemetry.tracing import TraceIncident
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadKind, Stamp
from lachesis.schemas.codec import Event, encode
from lachesis.schemas.errors import DataError

__all__ = ["StatelessStage", "StoredRollout", "run_stateless"]

_MAX_ANNOTATIONS_PER_MESSAGE = 256
_LAG_S = 1.0
_IDLE_LAG_S = 3.0
"""The same while nothing waits: what is stored then comes here, or to another replica, at once."""
_REDELIVERY = RetryPolicy(first_s=1.0, longest_s=OUTAGE_POLICY.longest_s)
"""When a group that was given back is delivered again. At most the pause of a held group between two attempts: when the
dependency is back, neither waits longer."""
_MAX_HALVINGS = 16

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class StatelessStage(Generic[Item]):
    """A stage: `handle` makes an item of a rollout, `stamp` puts the times into it, `event` makes a message of several.

    `event` gets the environment and the items, all of one `kind_of`. One replica handles `concurrency` groups at once
    and answers the broker within `ack_wait_s` seconds: so long, what a killed replica held waits for another, and
    whatever needs it waits too. A group whose dependencies fail is given back after `patience_s` seconds (None: never)
    and comes again after a delay; each time the one is halved and the other doubled, up to 5 s.
    """

    kind: subjects.Kind
    handle: Callable[[StoredRollout], Awaitable[Item]]
    event: Callable[[str, list[Item]], Event]
    stamp: Callable[[Item, Stamp], Item]
    kind_of: Callable[[Item], int | None] = lambda _: None
    concurrency: int = 16
    ack_wait_s: float = 5.0
    max_attempts: int = 5
    patience_s: float | None = None

    def patience(self, attempt: int) -> float | None:
        """Return for how long a group delivered for the `attempt`th time is retried, seconds.

        None: without bound.
        """
        return None if self.patience_s is None else self.patience_s / 2.0 ** min(attempt - 1, _MAX_HALVINGS)


@dataclass(frozen=True, slots=True)
class _HandledItem(Generic[Item]):
    env: str
    item: Item
    delivery: Delivery
    group: str
    stamp: Stamp
    spans: list[Span] = field(default_factory=list)
    """What is exported of the group's trace; empty where the group is not sampled."""


async def run_stateless(service: Service, stage: StatelessStage[Item]) -> None:
    """Run one replica of `stage` until the service drains."""
    service.vitals.slots = stage.concurrency
    replica = _Replica(service, stage, subjects.durable(service.name, service.run, service.revision))
    async with background() as tasks:
        tasks.start_soon(replica.keep_alive)
        tasks.start_soon(replica.follow_lag)
        try:
            await replica.work_until_drained()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
                await replica.give_back_all()


class _Replica(Generic[Item]):
    def __init__(self, service: Service, stage: StatelessStage[Item], durable: str) -> None:
        self.service = service
        self.stage = stage
        self.durable = durable
        self.held: dict[int, Delivery] = {}
        self.offered: list[Delivery] = []  # held, but not begun by any worker
        self.attempts = DeliveryAttempts(service.bus, durable)
        self.deaths: dict[int, int] = {}  # before this life, of what was begun and is noted
        self.one_suspect = anyio.Lock()
        self.traces = StageTraces(service, durable)

    async def work_until_drained(self) -> None:
        """Deliveries -> workers -> emitter; a drain ends the first, and each ends the next once it has finished."""
        feed_out, feed_in = anyio.create_memory_object_stream[Delivery](0)
        ready_out, ready_in = anyio.create_memory_object_stream[_HandledItem[Item]](_MAX_ANNOTATIONS_PER_MESSAGE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed, feed_out)
            for _ in range(self.stage.concurrency):
                tasks.start_soon(self._work, feed_in.clone(), ready_out.clone())
            feed_in.close()
            ready_out.close()
            await self._emit(ready_in)

    async def _feed(self, out: MemoryObjectSendStream[Delivery]) -> None:
        stage = self.stage
        async with out:
            async with (
                self.service.until_drained(),
                self.service.bus.consume(
                    subjects.ROLLOUTS,
                    self.durable,
                    [subjects.rollout(self.service.run)],
                    max_messages=2 * stage.concurrency,
                    ack_wait_s=stage.ack_wait_s,
                ) as deliveries,
            ):
                self.service.mark_ok()
                async for delivery in deliveries:
                    self._hold(delivery)
                    self.offered.append(delivery)
                    await out.send(delivery)
            while self.offered:
                await self._give_back(self.offered.pop())

    async def _work(
        self, deliveries: MemoryObjectReceiveStream[Delivery], out: MemoryObjectSendStream[_HandledItem[Item]]
    ) -> None:
        async with deliveries, out:
            async for delivery in deliveries:
                if delivery not in self.offered:
                    continue  # given back by the drain on its way here
                self.offered.remove(delivery)
                start_ns = self.service.now_ns()
                try:
                    with self.service.vitals.working():
                        ready = await self._handle(delivery, start_ns)
                except DataError as error:
                    self.service.record_call(start_ns, 0, failed=True)
                    await self._bury(delivery, "data", error, start_ns)
                except InfrastructureError as error:  # only once the service drains, or its patience is at an end
                    await self._put_off(delivery, error)
                except Exception:
                    await self._blame(delivery)
                    raise
                else:
                    if ready is not None:
                        await out.send(ready)

    async def _handle(self, delivery: Delivery, start_ns: int) -> _HandledItem[Item] | None:
        stage, message = self.stage, delivery.message
        async with AsyncExitStack() as turn:
            if delivery.attempt > 1:
                self.service.vitals.redelivered += 1
                deaths: int = await self.service.retrying("read attempts")(self.attempts.deaths, message.seq)
                if deaths >= stage.max_attempts:
                    self.deaths[message.seq] = deaths  # on record until it is settled
                    error = DataError(f"handling it ended the process {deaths} times")
                    await self._bury(delivery, "poison", error, start_ns, attempts=deaths)
                    return None
                if deaths:
                    await turn.enter_async_context(self.one_suspect)
                    if self.service.draining.is_set():
                        await self._give_back(delivery)
                        return None
                await self.service.retrying("note an attempt")(self.attempts.record, message.seq, deaths + 1)
                self.deaths[message.seq] = deaths
            rollout = read_rollout(message)
            group = rollout.group.id
            children = turn.enter_context(self.traces.recording(delivery, group, start_ns))
            patience_s = stage.patience(delivery.attempt)

            async def handle() -> Item:
                try:
                    return await stage.handle(rollout)
                except InfrastructureError:
                    await self._absolve(delivery)
                    raise

            item = await self.service.retrying(f"group {group}", patience_s=patience_s)(handle)
        self.service.mark_ok()
        stamp = Stamp(self.service.name, message.time_ns, start_ns, self.service.now_ns(), delivery.attempt)
        self.service.vitals.done(stamp, traced=group if self.service.tracing.sampled(group) else None)
        self.service.record_call(start_ns, len(rollout.group.sequences), payload=len(message.data))
        spans = self.traces.work_spans(delivery, group, stamp, children)
        return _HandledItem(rollout.group.env, stage.stamp(item, stamp), delivery, group, stamp, spans)

    async def _emit(self, items: MemoryObjectReceiveStream[_HandledItem[Item]]) -> None:
        async with items:
            async for first in items:
                batch = [first]
                while len(batch) < _MAX_ANNOTATIONS_PER_MESSAGE:
                    try:
                        batch.append(items.receive_nowait())
                    except (anyio.WouldBlock, anyio.EndOfStream):
                        break
                alike: defaultdict[tuple[str, int | None], list[_HandledItem[Item]]] = defaultdict(list)
                for ready in batch:
                    alike[ready.env, self.stage.kind_of(ready.item)].append(ready)
                for (env, _), group in alike.items():
                    await self._publish(env, group)

    async def _publish(self, env: str, batch: list[_HandledItem[Item]]) -> None:
        service, stage = self.service, self.stage
        event = stage.event(env, [ready.item for ready in batch])
        # by sequence, not by group: a copy of a group has an annotation of its own, which somebody may wait for
        seqs = " ".join(str(ready.delivery.message.seq) for ready in batch)
        names = hashlib.sha256(seqs.encode()).hexdigest()[:32]
        subject = subjects.event(stage.kind, service.run, service.revision, env)
        start_ns = service.now_ns()
        try:
            event.check()
            data = encode(event)
            ack: PubAck = await service.retrying(f"publish {subject}")(
                service.bus.publish, subject, data, msg_id=f"{stage.kind}.{service.revision}.{names}"
            )
        except InfrastructureError:  # draining: the groups are handled again by another replica
            for ready in batch:
                service.tracing.emit(ready.spans)
                await self._give_back(ready.delivery)
        except DataError as error:  # too large for one message, or a result that no reader would take
            if len(batch) == 1:
                await self._bury(batch[0].delivery, "data", error, start_ns, worked=batch[0].spans)
                return
            half = len(batch) // 2
            await self._publish(env, batch[:half])
            await self._publish(env, batch[half:])
        else:
            service.mark_ok()
            service.vitals.emitted += len(batch)
            times = start_ns, service.now_ns()
            for ready in batch:
                if ready.spans:
                    self.traces.export_work(
                        ready.group, ready.stamp.attempt, ready.spans, ack, subject=subject, times=times, size=len(data)
                    )
                elif ready.stamp.attempt > 1:
                    await announce_incident(service, ready.group, TraceIncident(ready.stamp))
                await self._finish(ready.delivery)

    async def _bury(
        self,
        delivery: Delivery,
        kind: DeadKind,
        error: DataError,
        start_ns: int,
        *,
        attempts: int = 1,
        worked: Sequence[Span] = (),
    ) -> None:
        letter = dead_letter(self.service, delivery.message, kind, error, attempts=attempts)
        try:
            await self.service.retrying("publish a dead letter")(publish_dead_letter, self.service, letter)
        except InfrastructureError:
            await self._give_back(delivery)
            return
        await self.traces.report_dead_letter(delivery, letter, error, start_ns, worked=worked)
        count_dead(self.service, letter)
        await self._finish(delivery)

    async def _finish(self, delivery: Delivery) -> None:
        await self._clear(delivery, 0)
        await delivery.ack()
        self._let_go(delivery)

    async def _give_back(self, delivery: Delivery, delay_s: float = 0.0) -> None:
        await self._clear(delivery, self.deaths.get(delivery.message.seq, 0))
        await delivery.nak(delay_s)
        self._let_go(delivery)

    async def _put_off(self, delivery: Delivery, error: InfrastructureError) -> None:
        """Give back a group that cannot be handled for now; unless the service drains, it comes again after a while."""
        if self.service.draining.is_set():
            await self._give_back(delivery)
            return
        delay_s = _REDELIVERY.pause_s(delivery.attempt)
        self.service.mark_waiting("waiting", f"sequence {delivery.message.seq} comes again in {delay_s:g} s: {error}")
        self.service.vitals.given_back += 1
        await self._give_back(delivery, delay_s)

    async def _absolve(self, delivery: Delivery) -> None:
        """Take back the note of an attempt that a failing dependency ended: who is killed while it fails, and however
        often, is not killed by the group."""
        deaths = self.deaths.get(delivery.message.seq)
        if deaths is not None:
            await self._clear(delivery, deaths)
            if deaths:
                self.deaths[delivery.message.seq] = deaths  # still on record

    async def _clear(self, delivery: Delivery, deaths: int) -> None:
        """Remove the note of an attempt before the next handler reads it. Without a record, a note counts once."""
        if self.deaths.pop(delivery.message.seq, None) is not None:
            with suppress(InfrastructureError):
                await self.service.retrying("clear an attempt")(self.attempts.record, delivery.message.seq, deaths)

    async def _blame(self, delivery: Delivery) -> None:
        """Give back the group whose handling ends this service, and leave that on record."""
        seq = delivery.message.seq
        self._let_go(delivery)
        with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
            if self.deaths.pop(seq, None) is None and delivery.attempt == 1:
                with suppress(InfrastructureError):
                    await self.attempts.record(seq, 1)
            await delivery.nak()

    def _hold(self, delivery: Delivery) -> None:
        self.held[delivery.message.seq] = delivery
        self.service.vitals.in_flight = len(self.held)

    def _let_go(self, delivery: Delivery) -> None:
        self.traces.forget(delivery.message.seq)
        self.held.pop(delivery.message.seq, None)
        self.service.vitals.in_flight = len(self.held)

    async def give_back_all(self) -> None:
        for delivery in list(self.held.values()):
            await self._give_back(delivery)

    async def keep_alive(self) -> None:
        """Restart the acknowledgement timer of everything held, three times in each period."""
        while True:
            await anyio.sleep(self.stage.ack_wait_s / 3)
            for delivery in list(self.held.values()):
                await delivery.in_progress()

    async def follow_lag(self) -> None:
        while True:
            try:
                lag = await self.service.bus.lag(subjects.ROLLOUTS, self.durable)
                self.service.vitals.lag = lag.pending + lag.unacked
            except (InfrastructureError, NotFoundError):
                self.service.vitals.lag = None  # unknown: the broker is away, or the consumer is gone
            is_idle = self.service.vitals.lag == 0 and not self.held
            await sleep_until_tick(_IDLE_LAG_S if is_idle else _LAG_S)
