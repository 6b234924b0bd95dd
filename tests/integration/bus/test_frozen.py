"""A server that neither answers nor closes: memory stays bounded, and everything goes on when it wakes."""

import asyncio
import os
import signal

import anyio
import psutil

from lachesis.pipeline.bus.config import ConnectionConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas import subjects
from lachesis.schemas.subjects import ROLLOUTS

ALL = subjects.rollout("run")
WINDOW = 4 << 20


async def test_a_frozen_server_bounds_what_waits(fresh_server: EmbeddedServer, streams_config: StreamsConfig) -> None:
    config = ConnectionConfig(window_bytes=WINDOW)
    acked: list[int] = []
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token, config=config) as bus:
        await bus.ensure_streams(streams_config)

        async def publish(i: int) -> None:
            acked.append((await bus.publish(subjects.rollout("run", "math"), bytes(256 << 10), msg_id=str(i))).seq)

        await publish(0)
        os.kill(fresh_server.pid, signal.SIGSTOP)
        try:
            async with anyio.create_task_group() as tasks:
                for i in range(1, 200):  # 50 MiB
                    tasks.start_soon(publish, i)
                worst = 0
                for _ in range(30):
                    await anyio.sleep(0.05)
                    worst = max(worst, bus._link.nc.pending_data_size, bus._publisher._window.bytes)
                assert len(acked) == 1
                assert 0 < worst <= WINDOW + (1 << 20)
                with anyio.move_on_after(0.5) as scope:  # a caller can give up on a call that is stuck
                    await bus.publish(subjects.rollout("run", "math"), bytes(1 << 20), msg_id="given up")
                assert scope.cancelled_caught
                os.kill(fresh_server.pid, signal.SIGCONT)
        finally:
            os.kill(fresh_server.pid, signal.SIGCONT)
        async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
            ids = [m.headers["Nats-Msg-Id"] async for m in reader if m.headers["Nats-Msg-Id"] != "given up"]
        assert sorted(map(int, ids)) == list(range(200))
        assert len(acked) == 200


async def test_frozen_until_the_connection_is_given_up(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    """Longer than the pings allow (9 s): the client lets go, connects again and goes on."""
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token) as bus:
        await bus.ensure_streams(streams_config)
        async with bus.read(ROLLOUTS, [ALL]) as reader, bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
            await bus.publish(subjects.rollout("run", "math"), b"0", msg_id="0")
            iterator = aiter(reader)
            assert (await anext(iterator)).data == b"0"
            os.kill(fresh_server.pid, signal.SIGSTOP)
            try:
                with anyio.fail_after(60):
                    while not bus.reconnects:  # noqa: ASYNC110
                        await anyio.sleep(0.1)
            finally:
                os.kill(fresh_server.pid, signal.SIGCONT)
            await bus.publish(subjects.rollout("run", "math"), b"1", msg_id="1")
            with anyio.fail_after(60):
                assert (await anext(iterator)).data == b"1"
                missing = {b"0", b"1"}
                while missing:  # what was on its way when the server froze comes once more, later
                    missing.discard((await anext(deliveries)).message.data)


async def test_an_answer_to_a_flush_that_was_given_up(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    """The stock client stops reading at such a pong, as late as it may come, and stays deaf until its pings tell."""
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token) as bus:
        await bus.ensure_streams(streams_config)
        os.kill(fresh_server.pid, signal.SIGSTOP)
        while psutil.Process(fresh_server.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        try:
            with anyio.move_on_after(0.5) as scope:
                await bus.client.flush()
            assert scope.cancelled_caught
        finally:
            os.kill(fresh_server.pid, signal.SIGCONT)
        await bus.client.flush()  # answered in order
        await bus.publish(subjects.rollout("run", "math"), b"0", msg_id="0")
        assert bus.reconnects == 0


async def test_a_plain_cancellation_is_not_swallowed(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    """The client's `publish` swallows the one cancellation that asyncio sends; ours must not."""
    config = ConnectionConfig(window_bytes=64 << 20)
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token, config=config) as bus:
        await bus.ensure_streams(streams_config)
        os.kill(fresh_server.pid, signal.SIGSTOP)
        try:
            tasks = [
                asyncio.create_task(
                    asyncio.wait_for(bus.publish(subjects.rollout("run", "math"), bytes(1 << 20), msg_id=str(i)), 0.5)
                )
                for i in range(40)
            ]
            with anyio.fail_after(60):  # one that is swallowed waits for the server
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(outcome, TimeoutError) for outcome in outcomes)
        finally:
            os.kill(fresh_server.pid, signal.SIGCONT)


async def test_a_subscription_made_while_the_server_is_frozen_does_not_break_the_connection(
    fresh_server: EmbeddedServer,
) -> None:
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token) as bus:
        os.kill(fresh_server.pid, signal.SIGSTOP)
        try:
            async with bus.listen("rl.heartbeat.run.a.b") as beats:  # gives up waiting for the server, and goes on
                os.kill(fresh_server.pid, signal.SIGCONT)
                with anyio.fail_after(60):
                    await bus.broadcast("rl.heartbeat.run.a.b", b"heard")
                    assert (await anext(beats)).data == b"heard"
            assert bus.reconnects == 0, "the connection went deaf, and was given up for that"
        finally:
            os.kill(fresh_server.pid, signal.SIGCONT)
