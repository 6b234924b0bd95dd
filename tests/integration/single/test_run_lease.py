"""The lease by which a run has one supervisor: who is refused, who takes over, and who learns that it lost."""

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.errors import StartupError
from lachesis.schemas import keys
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import SupervisorLease
from lachesis.services.run import process_identity as identity
from lachesis.services.run import supervisor_lease as run_lease
from lachesis.services.run.process_identity import started_ticks
from lachesis.services.run.supervisor_lease import RunLease, lock_folder

KEY, RUN = keys.SUPERVISOR, "r"


def lease_of(bus: Bus, folder: Path, *, lost: anyio.Event | None = None, ttl_s: float = 0.5) -> RunLease:
    folder.mkdir(exist_ok=True)
    return RunLease(bus, RUN, folder, (lost or anyio.Event()).set, ttl_s=ttl_s)


def pretend(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Have this process be on another machine from now on."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    reboot(monkeypatch, f"boot of {host}")


def reboot(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Have this process know nothing of the pids that it knew."""
    for module in (run_lease, identity):
        monkeypatch.setattr(module, "machine_id", lambda: machine)


async def stored(bus: Bus) -> SupervisorLease:
    entry = await bus.value(KEY)
    assert entry is not None
    return decode(SupervisorLease, entry.value)


@asynccontextmanager
async def holding(lease: RunLease) -> AsyncIterator[None]:
    await lease.acquire()
    async with lease.held():
        yield


async def test_a_second_supervisor_is_refused_at_once_and_told_who_runs_the_run(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holding(lease_of(bus, tmp_path / "one", ttl_s=300.0)):
        others = [lease_of(bus, tmp_path / "two")]
        pretend(monkeypatch, "far")
        others.append(lease_of(bus, tmp_path / "two"))  # of whose pid nothing is known there
        for other in others:
            with anyio.fail_after(60), pytest.raises(StartupError) as refused:
                await other.acquire()
            assert f"(pid {os.getpid()}, folder {tmp_path / 'one'})" in str(refused.value)
            assert "stop that one first" in str(refused.value)
            assert not other.is_held
    assert (await stored(bus)).released
    async with holding(others[1]):  # once it was given back
        assert (await stored(bus)).host == "far"


async def test_a_supervisor_that_was_killed_is_followed_at_once(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await anyio.open_process([sys.executable, "-c", "input()"])
    ticks = started_ticks(child.pid)
    assert ticks is not None
    lease = lease_of(bus, tmp_path / "one", ttl_s=300.0)
    monkeypatch.setattr(lease, "_mine", lease._mine.replace(pid=child.pid, started=ticks))
    await lease.acquire()
    second = lease_of(bus, tmp_path / "two")
    with pytest.raises(StartupError, match=f"pid {child.pid}"):
        await second.acquire()
    child.kill()
    await child.aclose()
    with anyio.fail_after(60):
        await second.acquire()  # in another folder of the same machine
    assert second.is_held


async def test_in_the_same_folder_a_predecessor_is_dead_whatever_its_pid_means(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that starts again: the same host and folder, another space of pids."""
    await lease_of(bus, tmp_path / "one", ttl_s=300.0).acquire()
    reboot(monkeypatch, "another space of pids")
    with lock_folder(tmp_path / "one", "r"), anyio.fail_after(60):
        again = lease_of(bus, tmp_path / "one")
        await again.acquire()
    assert again.is_held


async def test_a_copy_of_a_folder_is_another_folder(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lease_of(bus, tmp_path / "one", ttl_s=300.0)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / ".lock").write_text((tmp_path / "one" / ".lock").read_text())
    async with holding(first):
        reboot(monkeypatch, "another space of pids")
        with pytest.raises(StartupError, match="run already"):
            await lease_of(bus, tmp_path / "copy").acquire()


async def test_elsewhere_a_lease_ends_when_it_was_not_renewed_for_its_time(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await lease_of(bus, tmp_path / "one", ttl_s=0.5).acquire()  # and dies
    pretend(monkeypatch, "far")
    other = lease_of(bus, tmp_path / "two")
    with anyio.fail_after(60):
        await other.acquire()
    assert other.is_held
    assert "which does not answer: taking over in 0.5 s unless it renews its lease" in caplog.text


async def test_a_holder_that_cannot_be_asked_but_renews_keeps_its_lease(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease_of(bus, tmp_path / "one", ttl_s=2.0)

    async def unheard() -> bool:
        return False

    async with holding(first):
        pretend(monkeypatch, "far")
        other = lease_of(bus, tmp_path / "two")
        answers = iter([unheard, other._answers])

        async def ask() -> bool:  # the first question is lost
            return await next(answers)()

        monkeypatch.setattr(other, "_answers", ask)
        with anyio.fail_after(60), pytest.raises(StartupError, match="run already"):
            await other.acquire()
        assert first.is_held


async def test_a_holder_whose_lease_was_taken_is_told_and_says_by_whom(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = anyio.Event()
    first = lease_of(bus, tmp_path / "one", lost=lost, ttl_s=0.2)

    async def hold_until_lost() -> None:
        async with holding(first):
            await bus.put(KEY, encode(taken))
            with anyio.fail_after(60):
                await lost.wait()

    taken = first._mine.replace(host="far", machine="", pid=7, folder="/there", folder_id="x")
    with pytest.raises(StartupError, match=r"run r was taken over by a supervisor on far \(pid 7, folder /there\)"):
        await hold_until_lost()
    assert "stopping its services here" in caplog.text
    assert await stored(bus) == taken, "what it lost it does not give back"


async def test_a_lease_that_was_taken_and_given_back_or_deleted_goes_on(bus: Bus, tmp_path: Path) -> None:
    lost = anyio.Event()
    first = lease_of(bus, tmp_path / "one", lost=lost, ttl_s=0.2)
    async with holding(first):
        mine = await stored(bus)
        for change in ("given back", "deleted", "written by an attempt that seemed to fail"):
            match change:
                case "given back":
                    other = mine.replace(host="far", machine="", pid=7, folder_id="x", released=True)
                    await bus.put(KEY, encode(other))
                case "deleted":
                    await bus.delete(KEY)
                case _:
                    await bus.put(KEY, encode(mine))
            before = await bus.value(KEY)
            with anyio.fail_after(60):
                while (now := await bus.value(KEY)) is None or before is None or now.revision <= before.revision:
                    before = before or now
                    await anyio.sleep(0.01)
            assert await stored(bus) == mine
    assert not lost.is_set()


async def test_of_many_that_begin_at_once_one_has_the_run(bus: Bus, tmp_path: Path) -> None:
    held: list[RunLease] = []
    refused: list[str] = []

    async def begin(n: int) -> None:
        lease = lease_of(bus, tmp_path / str(n), ttl_s=300.0)
        try:
            await lease.acquire()
            held.append(lease)
        except StartupError as error:
            refused.append(str(error))

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for n in range(8):
                tasks.start_soon(begin, n)
    assert len(held) == 1
    assert len(refused) == 7


async def test_what_is_no_lease_is_said_and_not_overwritten(bus: Bus, tmp_path: Path) -> None:
    await bus.put(KEY, b"?")
    with pytest.raises(StartupError, match=r"cannot be read .* delete the key supervisor of the bucket"):
        await lease_of(bus, tmp_path / "one").acquire()
    entry = await bus.value(KEY)
    assert entry is not None
    assert entry.value == b"?"


@pytest.mark.slow
async def test_an_outage_of_the_server_ends_no_lease(
    fresh_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams_config: StreamsConfig
) -> None:
    """Longer than a lease lasts, with somebody who waits for its end the whole time."""
    lost = anyio.Event()
    async with (
        await connect(fresh_server.url, run=RUN, name="one", token=fresh_server.token) as ours,
        await connect(fresh_server.url, run=RUN, name="two", token=fresh_server.token) as theirs,
    ):
        await ours.ensure_streams(streams_config)
        first = lease_of(ours, tmp_path / "one", lost=lost, ttl_s=3.0)
        async with holding(first):
            pretend(monkeypatch, "far")
            other = lease_of(theirs, tmp_path / "two")

            async def unheard() -> bool:
                return False

            monkeypatch.setattr(other, "_answers", unheard)
            gave_up = anyio.Event()

            async def wait_for_its_end() -> None:
                with anyio.move_on_after(12), pytest.raises(StartupError, match="changes whenever"):
                    await other.acquire()
                gave_up.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_its_end)
                await fresh_server.stop()
                await anyio.sleep(4.0)  # longer than the lease lasts
                await fresh_server.start()
                await gave_up.wait()
            assert first.is_held
            assert not other.is_held
    assert not lost.is_set()
