"""Commands that follow a run on a server which is not the run's own, as processes: when they end, what they say."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.abc
import pytest

from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas import subjects
from lachesis.schemas.annotations import GroupScore, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import TrainReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FOLLOWING = {
    "tail": (["tail", "score", "--json"], subjects.EVENTS),
    "trace": (["trace", "--follow"], subjects.LEDGER),
    "rollouts": (["rollouts", "--follow"], subjects.LEDGER),
    "health": (["health", "--follow"], subjects.EVENTS),
}
"""By name: a command, and the stream that it reads."""
ENDED = b"lachesis: run demo has ended\n"


class World:
    """A server, and the run demo on it, which takes three steps."""

    def __init__(self, folder: Path, server: EmbeddedServer, bus: NatsBus) -> None:
        self.folder, self.server, self.bus = folder, server, bus

    async def start(self, *command: str) -> asyncio.subprocess.Process:
        token = self.folder / "token"
        token.write_text(self.server.token)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lachesis", *command, "--run", "demo", "--set", "training.steps=3",
            cwd=self.folder,
            env={**os.environ, "LACHESIS_NATS__URL": self.server.url, "LACHESIS_NATS__TOKEN_FILE": str(token)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    async def follow(self, which: str) -> asyncio.subprocess.Process:
        """Start a command and wait until it reads its stream."""
        command, stream = FOLLOWING[which]
        process = await self.start(*command)
        with anyio.fail_after(60):
            while not await self.readers(stream):  # noqa: ASYNC110 - another process's doing
                await anyio.sleep(0.05)
        return process

    async def readers(self, stream: str) -> int:
        name = subjects.stream_name(self.bus.run, stream)
        answer = await self.bus.client.request(f"$JS.API.STREAM.INFO.{name}", b"", timeout=10)
        return int(json.loads(answer.data)["state"]["consumer_count"])

    async def score(self, item: str) -> None:
        group = GroupScore(group=new_group_id(), seq=1, item=item, policy_step=0, scores=[1.0], ratings={}, lengths=[1])
        event = ScoreEvent(run="demo", env="words", revision="live", ensemble="e", raters={}, groups=[group])
        await self.bus.publish(subjects.event("score", "demo", "live", "words"), encode(event), msg_id=item)

    async def report_the_last_step(self) -> None:
        report = TrainReport(
            run="demo", trainer="main", lineage="a", term="t", step=3, ledger_index=0, chain="0" * 64, next_batch=3,
            policy_version="3-a-b", checkpoint="c",
        )  # fmt: skip
        await self.bus.publish(subjects.state("demo", "trainer", "live", "main"), encode(report), msg_id="t")

    async def speak(self) -> None:
        """Send heartbeats until cancelled."""
        event = Heartbeat(
            host="h",
            schema_version=1,
            run="demo",
            service="scorer",
            instance="1-a",
            pid=1,
            time_ns=0,
            stage=ServiceMetrics().report(),
        )
        while True:
            await self.bus.broadcast(subjects.heartbeat("demo", "scorer", "1-a"), encode(event))
            await anyio.sleep(0.2)


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with (
        EmbeddedServer(tmp_path / "server", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run="demo", name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(StreamsConfig())
        yield World(tmp_path, server, bus)


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, bytes, bytes]:
    """Wait for the end; return the exit code, the output and the errors."""
    with anyio.fail_after(60):
        output, errors = await process.communicate()
    return process.returncode, output, errors


@pytest.mark.parametrize("which", FOLLOWING)
async def test_it_ends_once_the_last_step_is_on_record_and_the_services_have_fallen_silent(
    world: World, which: str
) -> None:
    async with anyio.create_task_group() as services:
        services.start_soon(world.speak)
        process = await world.follow(which)
        await world.report_the_last_step()
        services.cancel_scope.cancel()
    assert await ended(process) == (0, b"", ENDED)


async def test_of_a_run_that_has_ended_it_shows_what_there_is(world: World) -> None:
    for item in ("a", "b"):
        await world.score(item)
    await world.report_the_last_step()
    code, output, errors = await ended(await world.start("tail", "score", "--json"))
    assert (code, errors) == (0, b"lachesis: run demo has ended; this is what there is of it\n")
    assert [json.loads(line)["event"]["groups"][0]["item"] for line in output.splitlines()] == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("which", FOLLOWING)
async def test_a_signal_ends_it_quietly(world: World, which: str, number: signal.Signals) -> None:
    process = await world.follow(which)
    process.send_signal(number)
    assert await ended(process) == (0, b"", b"")


@pytest.mark.parametrize("which", FOLLOWING)
async def test_a_signal_ends_it_quietly_while_it_waits_for_a_server(tmp_path: Path, which: str) -> None:
    mute = await anyio.create_tcp_listener(local_host="127.0.0.1")
    url = f"nats://127.0.0.1:{mute.extra(anyio.abc.SocketAttribute.local_port)}"  # noqa: S610 - no Django
    async with mute, anyio.create_task_group() as tasks:
        asked = anyio.Event()

        async def take(client: anyio.abc.SocketStream) -> None:
            asked.set()
            async with client:
                await anyio.sleep_forever()

        tasks.start_soon(mute.serve, take)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lachesis", *FOLLOWING[which][0], "--run", "demo", "--nats", url,
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        with anyio.fail_after(60):
            await asked.wait()
        process.terminate()
        assert await ended(process) == (0, b"", b"")
        tasks.cancel_scope.cancel()


async def test_a_server_that_goes_away_is_told_of_and_waited_for(world: World) -> None:
    process = await world.follow("tail")
    assert process.stdout is not None
    assert process.stderr is not None
    await world.server.stop()
    with anyio.fail_after(90):
        assert await process.stderr.readline() == b"lachesis: the server of run demo is unavailable; waiting for it\n"
        await world.server.start()
        assert await process.stderr.readline() == b"lachesis: the server of run demo is back\n"
        await world.score("after")
        assert b'"after"' in await process.stdout.readline()
    process.terminate()
    assert await ended(process) == (0, b"", b"")
