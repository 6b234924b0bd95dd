"""The same run from two folders on one server: the first goes on untouched, the others are refused by its name."""

import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import SupervisorLease

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = """
run = "twice"
mode = "observe"
inference.policy.url = "http://127.0.0.1:9"  # nobody there: the environment waits
services.drain_s = 2.0
[streams]
rollouts_bytes = 16777216
events_bytes = 16777216
replay_bytes = 16777216
teacher_bytes = 16777216
ledger_bytes = 16777216
bucket_bytes = 4194304
[environments.words]
kind = "sums.py:Sums"
"""
SUMS = Path(__file__).parents[2] / "examples" / "sums.py"


class Folder:
    """A folder in which the run is started, on a server that all of them share."""

    def __init__(self, path: Path, server: EmbeddedServer) -> None:
        path.mkdir()
        (path / "run.toml").write_text(CONFIG)
        (path / "sums.py").write_text(SUMS.read_text())
        (path / "token").write_text(server.token)
        self.path = path
        self.arguments = ["--config", "run.toml", "--nats", server.url, "--set", f"nats.token_file={path / 'token'}"]
        self.said = b""

    @asynccontextmanager
    async def running(self, *command: str) -> AsyncIterator[anyio.abc.Process]:
        """Run a `lachesis` command here; it is ended with the context."""
        process = await anyio.open_process(
            [sys.executable, "-m", "lachesis", *command, *self.arguments], cwd=self.path, stderr=-2
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
                with anyio.CancelScope(shield=True):
                    await self.rest(process)
                    await process.wait()
            await process.aclose()

    async def until(self, process: anyio.abc.Process, text: bytes) -> None:
        assert process.stdout is not None
        said = BufferedByteReceiveStream(process.stdout)
        with anyio.fail_after(200):
            try:
                self.said += await said.receive_until(text, 1 << 24)
            except anyio.IncompleteRead:
                pytest.fail(f"ended without {text!r}: {said.buffer.decode()}")

    async def rest(self, process: anyio.abc.Process) -> str:
        """Return what a process says until it ends."""
        assert process.stdout is not None
        with anyio.fail_after(150):
            said = b"".join([part async for part in process.stdout])
            await process.wait()
        return said.decode()

    def pids(self) -> dict[str, int]:
        return msgspec.json.decode((self.path / "runs/twice/pids.json").read_bytes())  # type: ignore[no-any-return]


@pytest.fixture
def folders(tmp_path: Path, fresh_server: EmbeddedServer) -> tuple[Folder, Folder]:
    return Folder(tmp_path / "one", fresh_server), Folder(tmp_path / "two", fresh_server)


READY = b"processes are ready"


async def test_the_second_is_refused_and_the_first_goes_on(
    folders: tuple[Folder, Folder], fresh_server: EmbeddedServer
) -> None:
    first, second = folders
    async with first.running("up") as up:
        await first.until(up, READY)
        before = first.pids()
        named = (
            rf"by a supervisor on {re.escape(socket.gethostname())} \(pid {up.pid}, folder {first.path}/runs/twice\)"
        )
        for folder, command, text in (
            (second, ("up",), named),
            (second, ("run", "batcher"), rf"another batcher of run twice runs already.*pid {before['batcher']} on "),
            (first, ("run", "governor", "--replica", "2"), rf"another governor .*pid {before['governor']} on "),
        ):
            async with folder.running(*command) as refused:
                said = await folder.rest(refused)
                assert refused.returncode == 2, said
                assert re.search(text, said), said
        async with (
            await connect(fresh_server.url, run="twice", name="test", token=fresh_server.token) as bus,
            bus.listen(subjects.heartbeat("twice", "scorer")) as beats,
            second.running("run", "scorer", "--replica", "2") as scorer,
        ):
            with anyio.fail_after(100):
                async for beat in beats:
                    if beat.subject.split(".")[-1].startswith(f"{scorer.pid}-"):
                        break
        assert first.pids() == before, "nothing had to start again"
        up.terminate()
        said = await first.rest(up)
        assert up.returncode == 0, said
        assert "starting it again" not in said
    async with second.running("up") as up:  # the lease was given back
        await second.until(up, READY)


async def test_a_killed_supervisor_is_followed_at_once_here_and_in_another_folder(
    folders: tuple[Folder, Folder],
) -> None:
    first, second = folders
    async with first.running("up") as up:
        await first.until(up, READY)
        up.kill()
        await first.rest(up)
    async with first.running("up") as up:
        await first.until(up, READY)
        os.kill(up.pid, signal.SIGKILL)
        await first.rest(up)
    async with second.running("up") as up:  # its services wait until those of the first have drained
        await second.until(up, READY)
    assert b"failed" not in second.said
    assert b"does not answer" not in first.said + second.said


async def test_up_is_refused_beside_services_started_by_hand(folders: tuple[Folder, Folder]) -> None:
    first, second = folders
    async with first.running("init") as init:
        said = await first.rest(init)
        assert init.returncode == 0, said
    async with first.running("run", "normalizer") as by_hand:
        await first.until(by_hand, b"started, pid")
        for folder in folders:
            async with folder.running("up") as up:
                said = await folder.rest(up)
            assert up.returncode == 2, said
            assert f"another normalizer of run twice runs already, and a run has one: pid {by_hand.pid} on" in said
    async with second.running("up") as up:
        await second.until(up, READY)


async def test_a_supervisor_whose_lease_was_taken_stops_its_services_and_says_so(
    folders: tuple[Folder, Folder], fresh_server: EmbeddedServer
) -> None:
    """As after a machine slept for longer than a lease lasts."""
    first, _ = folders
    async with (
        first.running("up") as up,
        await connect(fresh_server.url, run="twice", name="test", token=fresh_server.token) as bus,
    ):
        await first.until(up, READY)
        entry = await bus.value(keys.SUPERVISOR)
        assert entry is not None
        taken = decode(SupervisorLease, entry.value).replace(host="elsewhere", machine="", pid=7, folder_id="other")
        await bus.put(keys.SUPERVISOR, encode(taken))
        said = await first.rest(up)
        assert up.returncode == 2, said
        assert said.count("run twice was taken over by a supervisor on elsewhere (pid 7,") == 2
        assert "stopping its services here" in said
        log = (first.path / "runs/twice/logs/batcher.log").read_text()
        assert log.splitlines()[-1].endswith("batcher drained")
