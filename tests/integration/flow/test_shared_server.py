"""Several runs on one server: their governors never promise the same bytes, and what a dead one held comes back."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.pipeline.flow.stage import run_governor
from lachesis.pipeline.stage.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.errors import InfrastructureError
from lachesis.schemas.retention import Reservations
from lachesis.schemas.subjects import ROLLOUTS

SIZE = 100_000
BUDGET = 4 << 20
CLOSE = int(0.8 * BUDGET)
FLOW = FlowConfig(lease_s=3.0, reservation_s=1.0, retry_s=0.02)


class Run:
    """A governor with a connection of its own, and producers that renew what they hold and want more."""

    def __init__(self, name: str, bus: Bus, server: EmbeddedServer) -> None:
        self.name = name
        self.bus = bus
        self.config = RunConfig(run=name, batching=BatchingConfig(batch_size=1024), flow=FLOW)
        self.held: list[str] = []
        self.reason = ""
        self._server = server
        self._producing = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[anyio.CancelScope]:
        """Cancel what this yields to kill it all."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._govern)
            tasks.start_soon(self._renew)
            for _ in range(4):
                tasks.start_soon(self._want)
            yield tasks.cancel_scope
            tasks.cancel_scope.cancel()

    async def _govern(self) -> None:
        async with (
            await connect(self._server.url, name=self.name, token=self._server.token) as bus,
            open_service(bus, "governor", self.name) as service,
        ):
            self.vitals = service.vitals
            await run_governor(service, self.config)

    async def _ask(self, request: LeaseRequest) -> LeaseReply | None:
        try:
            subject = subjects.lease(self.name, request.env)
            return decode(LeaseReply, await self.bus.request(subject, encode(request), timeout_s=2.0))
        except InfrastructureError:
            return None

    async def _want(self) -> None:
        while True:
            reply = await self._ask(LeaseRequest(op="acquire", producer="p", env="a", sequences=1, bytes=SIZE))
            if reply is not None and reply.lease:
                self.held.append(reply.lease)
            elif reply is not None:
                self.reason = str(reply.reason)
            await anyio.sleep(0.02)

    async def _renew(self) -> None:
        while True:
            await anyio.sleep(FLOW.lease_s / 4)
            async with anyio.create_task_group() as tasks:
                for lease in self.held:
                    renewal = LeaseRequest(op="renew", producer="p", env="a", lease=lease, sequences=1, bytes=SIZE)
                    tasks.start_soon(self._ask, renewal)


async def reservations(bus: Bus) -> Reservations:
    entry = await bus.value(subjects.BUCKETS["retention"], subjects.RESERVATIONS)
    return decode(Reservations, entry.value) if entry else Reservations()


@pytest.fixture
async def runs(nats_bus: NatsBus, nats_server: EmbeddedServer, streams_config: StreamsConfig) -> list[Run]:
    await nats_bus.ensure_streams(msgspec.structs.replace(streams_config, rollouts_bytes=BUDGET))
    return [Run(name, nats_bus, nats_server) for name in ("one", "two", "three")]


async def test_two_governors_race_for_the_last_bytes_and_a_third_is_told_who_has_them(runs: list[Run]) -> None:
    one, two, three = runs
    most = CLOSE // SIZE
    async with one.running(), two.running():
        with anyio.fail_after(60):
            while len(one.held) + len(two.held) < most:  # noqa: ASYNC110  # every byte finds a taker
                await anyio.sleep(0.02)
        async with three.running():
            with anyio.fail_after(60):
                while not three.reason:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            await anyio.sleep(1.5 * FLOW.lease_s)  # renewed, the leases last
        print(f"{len(one.held)} + {len(two.held)} of {most} groups; {three.reason}")
        assert len(one.held) + len(two.held) == most
        assert not three.held
        assert "to runs one, two, of 80%" in three.reason
        assert one.held
        assert two.held


async def test_what_a_dead_run_was_promised_is_free_once_its_leases_have_run_out(
    runs: list[Run], nats_bus: NatsBus
) -> None:
    one, two, _ = runs
    most = CLOSE // SIZE
    await nats_bus.publish(subjects.rollout("one", "a"), b"x" * 10_000, msg_id="1")  # all that is stored
    async with one.running() as dies:
        with anyio.fail_after(60):
            while len(one.held) < most:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        async with two.running():
            with anyio.fail_after(60):
                while not two.reason:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            assert "to run one, of 80%" in two.reason
            with anyio.fail_after(60):
                while ROLLOUTS not in str(two.vitals.note):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            assert "ROLLOUTS has no room left: it holds 10,0" in str(two.vitals.note)
            assert "of them to run one: wait until they end" in str(two.vitals.note)
            dies.cancel()
            expires_ns = (await reservations(nats_bus)).runs["one"].expires_ns
            with anyio.fail_after(60):
                while not two.held:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            assert await nats_bus.server_time_ns() >= expires_ns
            with anyio.fail_after(60):
                while len(two.held) < most:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            assert (await reservations(nats_bus)).runs.keys() == {"two"}
