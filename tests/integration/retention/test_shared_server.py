"""Several runs on one server: each has streams, and so a budget, of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
from stages import run_governor

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest
from lachesis.schemas.subjects import ROLLOUTS

SIZE = 100_000
BUDGET = 4 << 20
CLOSE = int(0.8 * BUDGET)
FLOW = FlowConfig(lease_s=30.0, retry_s=0.02)


class Run:
    """A governor with a connection of its own, and producers that renew what they hold and want more."""

    def __init__(self, name: str, bus: Bus, server: EmbeddedServer) -> None:
        self.name = name
        self.bus = bus
        self.config = RunConfig(
            run=name,
            batching=BatchingConfig(batch_size=1024),
            flow=FLOW,
            environments={"a": EnvironmentConfig(kind="gateway")},
        )
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
            await connect(self._server.url, run=self.name, name="governor", token=self._server.token) as bus,
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


@asynccontextmanager
async def a_run(name: str, server: EmbeddedServer, streams: StreamsConfig) -> AsyncIterator[Run]:
    async with await connect(server.url, run=name, name="tests", token=server.token) as bus:
        await bus.ensure_streams(streams)
        yield Run(name, bus, server)


async def test_each_run_promises_its_own_bytes_whatever_others_hold(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    streams = msgspec.structs.replace(streams_config, rollouts_bytes=BUDGET)
    most = CLOSE // SIZE
    async with a_run("one", fresh_server, streams) as one, a_run("two", fresh_server, streams) as two:
        await one.bus.publish(subjects.rollout("one", "former"), b"x" * 10_000, msg_id="1")  # all that is stored
        async with one.running():
            with anyio.fail_after(60):
                while len(one.held) < most or ROLLOUTS not in str(one.vitals.status_text):  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            assert "ROLLOUTS has no room left: it holds 10,0" in str(one.vitals.status_text)
            assert "more are promised to groups under way: wait until they end" in str(one.vitals.status_text)
            async with two.running():
                with anyio.fail_after(60):
                    while len(two.held) < most or not two.reason:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
            assert len(one.held) == len(two.held) == most
            assert "of 80% of" in two.reason
