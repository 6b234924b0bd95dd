"""A real nats-server on a real disk that is full: what it leaves unanswered is stored once it was restarted."""

import logging
import os
import signal
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.disk_room import StoreFinding
from lachesis.pipeline.bus.embedded import EmbeddedServer, find_binary
from lachesis.pipeline.common.disk import SHORTAGES
from lachesis.schemas import subjects
from lachesis.services.supervisor.store_watch import watch_store

STREAMS = StreamsConfig(bucket_bytes=1 << 20)
SUBJECT = subjects.rollout("r", "env")


def _log_finding(found: StoreFinding) -> None:
    """As the supervisor's notices do."""
    if found.text is not None:
        logging.getLogger("lachesis").warning("%s", found.text)


async def _keep(server: EmbeddedServer) -> None:
    """As the supervisor does."""
    while True:
        await server.wait()
        await server.start_again()


async def _logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    with anyio.fail_after(90):
        while text not in caplog.text:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_a_stream_that_failed_takes_messages_again_once_there_is_room(small_disk, caplog) -> None:
    caplog.set_level(logging.INFO)
    disk = small_disk(96)
    stored: list[int] = []

    async def publish(count: int) -> None:
        for _ in range(count):
            ack = await bus.publish(SUBJECT, os.urandom(20_000), msg_id=f"m{len(stored)}")
            stored.append(ack.seq)

    async with (
        EmbeddedServer(disk.path / "nats") as server,
        await connect(server.url, run="r", name="test", token=server.token) as bus,
        anyio.create_task_group() as tasks,
    ):
        await bus.ensure_streams(STREAMS)
        tasks.start_soon(watch_store, server, STREAMS.total_bytes(), _log_finding)
        tasks.start_soon(_keep, server)
        await publish(3)
        first = server.pid
        disk.fill()
        async with anyio.create_task_group() as publishing:
            publishing.start_soon(publish, 20)
            await _logged(caplog, f"the disk that holds {disk.path / 'nats'} is full")
            await _logged(caplog, "no message is taken any more by lachesis_r_ROLLOUTS")
            assert server.pid == first  # a restart would not help yet
            held = len(stored)
            assert held < 23
            disk.free()
        assert server.pid != first
        assert "restarting nats-server, without which lachesis_r_ROLLOUTS" in caplog.text
        assert len(stored) == len(set(stored)) == 23
        async with bus.read(subjects.ROLLOUTS, [SUBJECT], follow=False) as messages:
            assert [message.seq async for message in messages] == stored
        tasks.cancel_scope.cancel()


async def test_a_server_is_not_restarted_where_nothing_failed(small_disk, caplog) -> None:
    disk = small_disk(96)
    async with (
        EmbeddedServer(disk.path / "nats") as server,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(watch_store, server, STREAMS.total_bytes(), _log_finding)
        first = server.pid
        disk.fill()
        await _logged(caplog, "is full")
        disk.free()
        await _logged(caplog, "may become full")
        assert server.pid == first
        tasks.cancel_scope.cancel()


async def test_a_server_that_dies_on_a_full_disk_comes_back_when_there_is_room(small_disk) -> None:
    disk = small_disk(96)
    async with EmbeddedServer(disk.path / "nats") as server, anyio.create_task_group() as tasks:
        url = server.url
        disk.fill()
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        tasks.start_soon(server.start_again)
        with anyio.fail_after(60):
            while SHORTAGES.longest_wait_text is None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        disk.free()
        with anyio.fail_after(60):
            while SHORTAGES.longest_wait_text is not None:  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert server.url == url  # where its clients look for it


async def test_a_server_that_is_killed_while_it_first_starts_is_started_once_more(tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    fail.touch()
    binary = tmp_path / "nats-server"
    binary.write_text(f'#!/bin/sh\n[ -e {fail} ] && rm {fail} && kill -9 $$\nexec {find_binary()} "$@"\n')
    binary.chmod(0o700)
    async with EmbeddedServer(tmp_path / "store", binary=binary) as server:
        assert not fail.exists()
        async with await connect(server.url, run="r", name="test", token=server.token):
            pass
