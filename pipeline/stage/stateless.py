"""Stateless stages: competing consumers of rollouts, each turning a group into an annotation.

What goes in: rollout groups, from the durable consumer that all replicas share. What comes out: annotation messages,
each carrying every group that was ready when it left (no lingering when only one is). Guarantees:

* a group is acknowledged only once its annotation, or its dead letter, is stored;
* what is held is kept alive (`in_progress`), and given back on drain;
* a bad group (`DataError`) becomes a dead letter at once; a failing dependency (`InfrastructureError`) is retried for
  as long as it fails and never becomes a result;
* a group that kills whoever handles it becomes a dead letter after `max_attempts` such deaths, counted in a durable
  record. Any other exception is a bug and ends the service.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from lachesis.pipeline.bus.api import Delivery
from lachesis.pipeline.stage.attempts import Attempts
from lachesis.pipeline.stage.deadletter import dead_letter, publish_dead_letter
from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadKind, Stamp
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.errors import DataError, InfrastructureError, NotFoundError
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["Rollout", "StatelessStage", "run_stateless"]

_MOST_IN_ONE_MESSAGE = 256
_LAG_S = 1.0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout group as stored: `seq` is its sequence in ROLLOUTS, `stored_ns` the server's time of storing it."""

    group: RolloutGroup
    seq: int
    stored_ns: int


@dataclass(frozen=True, slots=True)
class StatelessStage(Generic[Item]):
    """A stage: `handle` makes an item of a rollout, `stamp` puts the times into it, `event` makes a message of several.

    `event` gets the environment and the items. One replica handles `concurrency` groups at once and answers the broker
    within `ack_wait_s` seconds.
    """

    kind: subjects.Kind
    handle: Callable[[Rollout], Awaitable[Item]]
    event: Callable[[str, list[Item]], Event]
    stamp: Callable[[Item, Stamp], Item]
    concurrency: int = 16
    ack_wait_s: float = 30.0
    max_attempts: int = 5


@dataclass(frozen=True, slots=True)
class _Ready(Generic[Item]):
    env: str
    group: str
    item: Item
    delivery: Delivery


async def run_stateless(service: Service, stage: StatelessStage[Item]) -> None:
    """Run one replica of `stage` until the service drains."""
    durable = subjects.durable(service.name, service.run, service.revision)
    replica = _Replica(service, stage, durable)
    try:
        async with (
            service.bus.consume(
                subjects.ROLLOUTS,
                durable,
                [subjects.rollout(service.run)],
                max_messages=2 * stage.concurrency,
                ack_wait_s=stage.ack_wait_s,
            ) as deliveries,
            anyio.create_task_group() as tasks,
        ):
            service.recovered()
            tasks.start_soon(replica.keep_alive)
            tasks.start_soon(replica.follow_lag)
            await replica.work_until_drained(deliveries)
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2.0):
            await replica.give_back_all()


class _Replica(Generic[Item]):
    def __init__(self, service: Service, stage: StatelessStage[Item], durable: str) -> None:
        self.service = service
        self.stage = stage
        self.durable = durable
        self.held: dict[int, Delivery] = {}
        self.attempts = Attempts(service.bus, durable)

    async def work_until_drained(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Deliveries -> workers -> emitter; a drain ends the first, and each ends the next once it has finished."""
        feed_out, feed_in = anyio.create_memory_object_stream[Delivery](0)
        ready_out, ready_in = anyio.create_memory_object_stream[_Ready[Item]](_MOST_IN_ONE_MESSAGE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._feed, deliveries, feed_out)
            for _ in range(self.stage.concurrency):
                tasks.start_soon(self._work, feed_in.clone(), ready_out.clone())
            feed_in.close()
            ready_out.close()
            await self._emit(ready_in)

    async def _feed(self, deliveries: AsyncIterator[Delivery], out: MemoryObjectSendStream[Delivery]) -> None:
        async with out, anyio.create_task_group() as tasks:

            async def end_on_drain() -> None:
                await self.service.draining.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_on_drain)
            async for delivery in deliveries:
                self._hold(delivery)
                await out.send(delivery)

    async def _work(
        self, deliveries: MemoryObjectReceiveStream[Delivery], out: MemoryObjectSendStream[_Ready[Item]]
    ) -> None:
        async with deliveries, out:
            async for delivery in deliveries:
                start_ns = time.time_ns()
                try:
                    ready = await self._handle(delivery, start_ns)
                except DataError as error:
                    await self._bury(delivery, "data", error)
                except InfrastructureError:  # only once the service drains: until then it is retried
                    await self._give_back(delivery)
                else:
                    if ready is not None:
                        await out.send(ready)

    async def _handle(self, delivery: Delivery, start_ns: int) -> _Ready[Item] | None:
        stage, message = self.stage, delivery.message
        if delivery.attempt > 1:
            self.service.health.redelivered += 1
            deaths = await self.attempts.begin(message.seq)
            if deaths >= stage.max_attempts:
                error = DataError(f"handling it ended the process {deaths} times")
                await self._bury(delivery, "poison", error, attempts=deaths)
                return None
        rollout = Rollout(decode(RolloutGroup, message.data), message.seq, message.time_ns)
        async for attempt in self.service.retrying(f"group {rollout.group.id}"):
            with attempt:
                item = await stage.handle(rollout)
        self.service.recovered()
        stamp = Stamp(self.service.name, message.time_ns, start_ns, time.time_ns(), delivery.attempt)
        self.service.health.done(stamp)
        return _Ready(rollout.group.env, rollout.group.id, stage.stamp(item, stamp), delivery)

    async def _emit(self, items: MemoryObjectReceiveStream[_Ready[Item]]) -> None:
        async with items:
            async for first in items:
                batch = [first]
                while len(batch) < _MOST_IN_ONE_MESSAGE:
                    try:
                        batch.append(items.receive_nowait())
                    except (anyio.WouldBlock, anyio.EndOfStream):
                        break
                by_env: defaultdict[str, list[_Ready[Item]]] = defaultdict(list)
                for ready in batch:
                    by_env[ready.env].append(ready)
                for env, group in by_env.items():
                    await self._publish(env, group)

    async def _publish(self, env: str, batch: list[_Ready[Item]]) -> None:
        service, stage = self.service, self.stage
        event = stage.event(env, [ready.item for ready in batch])
        names = hashlib.sha256("".join(ready.group for ready in batch).encode()).hexdigest()[:32]
        subject = subjects.event(stage.kind, service.run, service.revision, env)
        try:
            async for attempt in service.retrying(f"publish {subject}"):
                with attempt:
                    await service.bus.publish(subject, encode(event), msg_id=f"{stage.kind}.{service.revision}.{names}")
        except InfrastructureError:  # draining: the groups are handled again by another replica
            for ready in batch:
                await self._give_back(ready.delivery)
            return
        service.recovered()
        service.health.emitted += len(batch)
        for ready in batch:
            await self._settle(ready.delivery)

    async def _bury(self, delivery: Delivery, kind: DeadKind, error: DataError, *, attempts: int = 1) -> None:
        letter = dead_letter(self.service, delivery.message, kind, error, attempts=attempts)
        try:
            async for attempt in self.service.retrying("publish a dead letter"):
                with attempt:
                    await publish_dead_letter(self.service, letter)
        except InfrastructureError:
            await self._give_back(delivery)
            return
        self.service.health.dead += 1
        await self._settle(delivery)

    async def _settle(self, delivery: Delivery) -> None:
        await delivery.ack()
        await self._let_go(delivery)

    async def _give_back(self, delivery: Delivery) -> None:
        await delivery.nak()
        await self._let_go(delivery)

    def _hold(self, delivery: Delivery) -> None:
        self.held[delivery.message.seq] = delivery
        self.service.health.in_flight = len(self.held)

    async def _let_go(self, delivery: Delivery) -> None:
        self.held.pop(delivery.message.seq, None)
        self.service.health.in_flight = len(self.held)
        if delivery.attempt > 1:
            await self.attempts.survived(delivery.message.seq)

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
                self.service.health.lag = lag.pending + lag.unacked
            except (InfrastructureError, NotFoundError):
                self.service.health.lag = None  # unknown while the broker is away
            await anyio.sleep(_LAG_S)
