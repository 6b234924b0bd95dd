"""Warm spares as the supervisor keeps them, in real processes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from lachesis.services import spare as module
from lachesis.services.process import STARTUP
from lachesis.services.spare import Spares, Told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@asynccontextmanager
async def keeping(folder: Path, *arguments: str) -> AsyncIterator[Spares]:
    spares = Spares(arguments, {"trainer"}, 1, folder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(spares.keep)
        yield spares
        tasks.cancel_scope.cancel()


def waiting() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child.status() != psutil.STATUS_ZOMBIE and "spare" in child.cmdline():
                found.append(child)
    return found


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(150):
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await anyio.sleep(0.02)


async def test_a_spare_becomes_what_it_is_told_and_another_takes_its_place(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    async with keeping(tmp_path, "--nats", "nats://127.0.0.1:9", "--set", f"folder={tmp_path}") as spares:
        await until(lambda: len(spares._idle) == 1)
        first = spares._idle[0].process.pid
        process = await spares.take(Told(service="trainer", part="", replica=1, log=str(log)))
        assert process is not None
        assert process.pid == first
        await until(lambda: {child.pid for child in waiting()} - {first} != set())
        assert await process.wait() == STARTUP  # there is no server, which it says where it was told to
        assert "trainer" in log.read_text()
        assert "nats://127.0.0.1:9" in log.read_text()
    assert not waiting()


async def test_a_spare_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    async with keeping(tmp_path) as spares:
        await until(lambda: bool(spares._idle))
        first = waiting()[0]
        first.kill()
        await until(lambda: bool(spares._idle) and spares._idle[0].process.pid != first.pid)
        taken = await spares.take(Told(service="trainer", part="", replica=1, log=str(tmp_path / "log")))
        assert taken is not None
        assert taken.pid != first.pid
        taken.kill()
        await taken.wait()


async def test_what_waits_when_they_are_renewed_is_never_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(tmp_path) as spares:
        await until(lambda: bool(spares._idle))
        first = waiting()[0]
        spares.renew()
        told = Told(service="trainer", part="", replica=1, log=str(tmp_path / "log"))
        assert await spares.take(told) is None, "there is none before another was started"
        await until(lambda: bool(spares._idle))
        assert not first.is_running()
        taken = await spares.take(told)
        assert taken is not None
        assert taken.pid != first.pid
        taken.kill()
        await taken.wait()
    assert "a spare ended" not in caplog.text


async def test_a_spare_whose_pipe_is_closed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with keeping(tmp_path) as spares:
        await until(lambda: bool(spares._idle))

        async def send(_: bytes) -> None:
            raise ConnectionResetError("Connection lost")

        broken = spares._idle[0].process
        monkeypatch.setattr(broken.stdin, "send", send)
        taken = await spares.take(Told(service="trainer", part="", replica=1, log=str(tmp_path / "log")))
        assert broken.returncode is not None
        if taken is not None:  # the one that was started in its place
            assert taken.pid != broken.pid
            taken.kill()
            await taken.wait()


async def test_a_spare_ends_with_its_supervisor(tmp_path: Path) -> None:
    async with keeping(tmp_path) as spares:
        await until(lambda: bool(spares._idle))
        process = spares._idle[0].process
        assert process.stdin is not None
        await process.stdin.aclose()  # as when the supervisor is killed
        with anyio.fail_after(150):
            assert await process.wait() == 0


async def test_there_are_spares_with_torch_and_without_and_each_becomes_its_own_kind(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        spares = Spares((), {"trainer", "batcher"}, 1, tmp_path)
        tasks.start_soon(spares.keep)
        await until(lambda: len(spares._idle) == 2)
        kinds = {spare.kind: spare.process.pid for spare in spares._idle}
        for service, kind in (("batcher", "plain"), ("inference", "torch")):
            process = await spares.take(Told(service=service, part="", replica=1, log=str(tmp_path / "log")))
            assert process is not None
            assert process.pid == kinds[kind]
            process.kill()
            await process.aclose()
        assert await spares.take(Told(service="gateway", part="", replica=1, log=str(tmp_path / "log"))) is None
        tasks.cancel_scope.cancel()
