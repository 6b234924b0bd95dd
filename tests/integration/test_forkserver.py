"""Fork servers as the supervisor keeps them, in real processes."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from lachesis.services import forkserver as module
from lachesis.services.forkserver import Forked, ForkServers, Told
from lachesis.services.process import STARTUP

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AWAY = ("--nats", "nats://127.0.0.1:9")
"""No server is there, for which a service waits at first."""


@asynccontextmanager
async def keeping(
    folder: Path, *arguments: str, services: tuple[str, ...] = ("trainer",)
) -> AsyncIterator[ForkServers]:
    servers = ForkServers((*arguments, "--set", f"folder={folder}"), services, folder)
    async with anyio.create_task_group() as tasks:
        await tasks.start(servers.keep)
        yield servers
        tasks.cancel_scope.cancel()
    assert not waiting()


def waiting() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if child.status() != psutil.STATUS_ZOMBIE and "forkserver" in child.cmdline():
                found.append(child)
    return found


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(150):
        while not condition():  # noqa: ASYNC110 - other processes bring it about
            await anyio.sleep(0.02)


async def ready(servers: ForkServers) -> psutil.Process:
    await until(lambda: any(server._ready.is_set() for server in servers._servers))
    return psutil.Process(servers._servers[0].process.pid)


def told(folder: Path, service: str = "trainer") -> Told:
    return Told(service=service, part="", replica=1, log=str(folder / "service.log"))


async def forked(servers: ForkServers, folder: Path, service: str = "trainer") -> tuple[Forked, psutil.Process]:
    process = await servers.fork(told(folder, service))
    assert process is not None
    return process, psutil.Process(process.pid)


async def end(process: Forked) -> int:
    with anyio.fail_after(150):
        process.send_signal(signal.SIGKILL)
        return await process.wait()


async def test_a_fork_is_what_it_is_told_and_its_exit_code_is_known(tmp_path: Path) -> None:
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        lives = [await forked(servers, tmp_path) for _ in range(2)]
        assert {child.ppid() for _, child in lives} == {server.pid}
        title = f"lachesis run trainer --nats nats://127.0.0.1:9 --set folder={tmp_path}"
        await until(lambda: {" ".join(child.cmdline()).rstrip() for _, child in lives} == {title})
        assert await end(lives[0][0]) == -signal.SIGKILL
        with anyio.fail_after(150):
            assert await lives[1][0].wait() == STARTUP  # there is no server, which it says where it was told to
    said = (tmp_path / "service.log").read_text()
    assert "trainer" in said
    assert "nats://127.0.0.1:9" in said


async def test_a_fork_ends_with_its_supervisor(tmp_path: Path) -> None:
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        process, child = await forked(servers, tmp_path)
        servers._servers[0]._requests.shutdown(2)  # as when the supervisor is killed: this, and the pipe
        module.os.close(process._stdin)
        process._stdin = module.os.open(module.os.devnull, module.os.O_RDONLY)
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        await until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        assert "the supervisor is gone" in (tmp_path / "service.log").read_text()
        await process.wait()


async def test_a_server_that_is_killed_is_replaced_and_its_children_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    async with keeping(tmp_path, *AWAY) as servers:
        first = await ready(servers)
        process, child = await forked(servers, tmp_path)
        first.kill()
        await until(lambda: bool(servers._servers) and servers._servers[0].process.pid != first.pid)
        other, sibling = await forked(servers, tmp_path)  # once the next one has imported all
        assert sibling.ppid() == servers._servers[0].process.pid
        assert child.is_running()
        assert await end(process) == -signal.SIGKILL
        assert await end(other) == -signal.SIGKILL


async def test_nobody_who_ends_unseen_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_S", 0.5)
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        process, _ = await forked(servers, tmp_path)
        server.suspend()
        assert await end(process) == -signal.SIGKILL
        assert await servers.fork(told(tmp_path)) is None
        await until(lambda: not server.is_running())


async def test_what_has_changed_on_disk_is_never_forked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    package = tmp_path / "newly"
    package.mkdir()
    module_file = package / "sitecustomize.py"
    module_file.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(package))
        async with keeping(tmp_path, *AWAY) as servers:
            first = await ready(servers)
            process, _ = await forked(servers, tmp_path)
            module_file.write_text("import json")
            assert await servers.fork(told(tmp_path)) is None
            assert first.is_running(), "it has a child, whose end it is to tell"
            await until(lambda: bool(servers._servers))
            other, sibling = await forked(servers, tmp_path)
            assert sibling.ppid() != first.pid
            assert await end(process) == -signal.SIGKILL
            await until(lambda: not first.is_running())
            await end(other)
    assert "ended" not in caplog.text


async def test_each_service_is_forked_by_its_own_kind(tmp_path: Path) -> None:
    async with keeping(tmp_path, services=("trainer", "batcher")) as servers:
        await until(lambda: sum(server._ready.is_set() for server in servers._servers) == 2)
        kinds = {server.kind: server.process.pid for server in servers._servers}
        for service, kind in (("batcher", "plain"), ("inference", "torch")):
            process, child = await forked(servers, tmp_path, service)
            assert child.ppid() == kinds[kind]
            await end(process)
        assert await servers.fork(told(tmp_path, "gateway")) is None
