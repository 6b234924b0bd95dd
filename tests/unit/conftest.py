"""What tests of stages share: groups, a bus in memory that can die under a service, and services that run and drain."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from outside import pytest_runtest_setup, pytest_runtest_teardown

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import GENESIS, Batch, GroupRef, LedgerEntry
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Dispatch, Message, RolloutGroup, Sequences, VersionSpan

__all__ = ["Killed", "Lab", "MortalBus", "lab", "pytest_runtest_setup", "pytest_runtest_teardown"]


class Killed(BaseException):
    """Ends a service whose process was killed: it gets nothing out any more."""


class MortalBus:
    """One process's view of a bus. Once `dead`, nothing leaves it: no message, no acknowledgement, no key."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.dead = False
        self.acks = True
        """Whether acknowledgements arrive."""
        self.delays: list[float] = []
        """With what delays messages were given back, seconds."""

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def _call(self, name, *args, **kwargs):
        if self.dead:
            raise Killed
        return await getattr(self._bus, name)(*args, **kwargs)

    async def publish(self, *args, **kwargs):
        return await self._call("publish", *args, **kwargs)

    async def publish_large(self, *args, **kwargs):
        return await self._call("publish_large", *args, **kwargs)

    async def commit(self, *args, **kwargs):
        return await self._call("commit", *args, **kwargs)

    async def put(self, *args, **kwargs):
        return await self._call("put", *args, **kwargs)

    async def delete(self, *args, **kwargs):
        return await self._call("delete", *args, **kwargs)

    @asynccontextmanager
    async def consume(self, *args, **kwargs):
        async with self._bus.consume(*args, **kwargs) as deliveries:
            yield _mortal(self, deliveries)


async def _mortal(bus, deliveries):
    async for delivery in deliveries:
        yield _Delivery(bus, delivery)


class _Delivery:
    def __init__(self, bus, delivery):
        self._bus = bus
        self._delivery = delivery
        self.message = delivery.message
        self.attempt = delivery.attempt

    async def ack(self):
        if not self._bus.dead and self._bus.acks:
            await self._delivery.ack()

    async def nak(self, delay_s=0.0):
        if not self._bus.dead:
            self._bus.delays.append(delay_s)
            await self._delivery.nak(delay_s)

    async def in_progress(self):
        if not self._bus.dead:
            await self._delivery.in_progress()


class Lab:
    """A bus with helpers around it. `run` is the run's name, `alive` a place for the service that a test kills."""

    run = "r"
    alive: Service
    Killed = Killed

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus

    def group(self, n: int, *, env: str = "sums", samples: int = 2, tokens: int = 4, **changes) -> RolloutGroup:
        """Group number `n`: each sample is `tokens` tokens long, of which the first is the prompt."""
        total = samples * tokens
        mask = [t % tokens != 0 for t in range(total)]
        sequences = Sequences(
            offsets=as_bytes(range(0, total + 1, tokens), "int32"),
            tokens=as_bytes([10 + (n + t) % 50 for t in range(total)], "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes([-1.0 if learn else 0.0 for learn in mask], "float32"),
            finish_reasons=["stop"] * samples,
            version_spans=[VersionSpan(i, 0, 0) for i in range(samples)],
            rewards=changes.pop("rewards", {"environment": [float(i % 2) for i in range(samples)]}),
        )
        fields = {
            "id": f"{n:032x}",
            "run": self.run,
            "env": env,
            "item": f"item-{n}",
            "producer": "p",
            "epoch": 1,
            "counter": n,
            "policy_versions": ["0-first-abc"],
            "sequences": sequences,
            "tokenizer_hash": "tok",
            "started_ns": 1,
            "dispatch": Dispatch(index=n % 8, snapshot_id="s", probability=0.5),
            "messages": [[Message(role="user", content="q"), Message(role="assistant", content="a")]] * samples,
        }
        return RolloutGroup(**fields | changes)

    async def store(self, group: RolloutGroup) -> int:
        """Store a group as its environment does and return its sequence."""
        subject = subjects.rollout(self.run, group.env)
        headers = {PLAN_HEADER: Plan.of(group).pack()}
        msg_id = f"{group.id}.{group.counter}"
        return (await self.bus.publish_large(subject, encode(group), msg_id=msg_id, headers=headers)).seq

    async def events(self, kind, model, env: str = "sums"):
        """Every stored event of a kind, decoded."""
        subject = subjects.event(kind, self.run, subjects.LIVE, env)
        async with self.bus.read(subjects.EVENTS, [subject], follow=False) as messages:
            return [decode(model, message.data) async for message in messages]

    async def extend_ledger(self, *batches: list[RolloutGroup], trainer: str = "main") -> list[LedgerEntry]:
        """Store groups and one entry a batch, each after an entry without a batch, as the batcher writes them."""
        written = []
        subject = subjects.ledger(self.run, trainer)
        for groups in batches:
            refs = [await self._ref(group) for group in groups]
            for batch_refs in ([], refs):
                last = await self.bus.last(subjects.LEDGER, subject)
                before = decode(LedgerEntry, last.data) if last else None
                number = before.next_batch if before else 0
                batch = Batch(
                    number=number,
                    groups=batch_refs,
                    sequences=sum(ref.sequences for ref in batch_refs),
                    tokens=sum(ref.tokens for ref in batch_refs),
                )
                entry = LedgerEntry(
                    run=self.run,
                    trainer=trainer,
                    index=before.index + 1 if before else 0,
                    previous=before.digest() if before else GENESIS,
                    watermark=0,
                    resolved=b"",
                    events_cursor=1,
                    batch=batch if batch_refs else None,
                    next_batch=number + bool(batch_refs),
                )
                at = last.seq if last else 0
                headers = {PREVIOUS_HEADER: str(at)}
                await self.bus.commit(subject, encode(entry), expected=at, msg_id=f"{entry.index}", headers=headers)
                written.append(entry)
        return written

    async def _ref(self, group: RolloutGroup) -> GroupRef:
        plan = Plan.of(group)
        return GroupRef(
            group=group.id,
            seq=await self.store(group),
            env=group.env,
            sequences=plan.sequences,
            tokens=plan.tokens,
            policy_step=0,
            advantages=[(-1.0) ** i for i in range(plan.samples)],
        )

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float = 60) -> None:
        """Wait until `condition` holds; it is looked at whenever something changes on the bus, and now and then."""
        with anyio.fail_after(seconds):
            while not await condition():
                await self.bus.changed(until=self.bus.now() + 0.02)

    @staticmethod
    def said(service: Service) -> str:
        """Return what a service's next heartbeat says of it: what it waits for, its notes and its notices."""
        report = service.vitals.report()
        return "; ".join(filter(None, [report.note, *(notice.what for notice in report.notices)]))

    @asynccontextmanager
    async def running(
        self, main: Callable[[Service], Awaitable[None]], name: str = "stage", *, drain: bool = True
    ) -> AsyncIterator[Service]:
        """Run a service beside the body, and drain it afterwards; `kill` ends it as a kill of its process would."""
        service = Service(MortalBus(self.bus), name, self.run)
        scope = anyio.CancelScope()

        async def live() -> None:
            with scope:
                try:
                    await main(service)
                except Killed:
                    return
                except BaseExceptionGroup as error:
                    if not service.bus.dead or error.split(Killed)[1] is not None:
                        raise

        def kill() -> None:
            service.bus.dead = True
            scope.cancel()

        service.kill = kill
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live)
            yield service
            if drain and not service.bus.dead:
                service.drain()


@pytest.fixture
async def lab():
    async with MemoryBus() as bus:
        yield Lab(bus)
