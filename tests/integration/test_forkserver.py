"""Fork servers as the supervisor keeps them, in real processes."""

import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import psutil
import pytest

from lachesis.services.process.service_process import EXIT_STARTUP
from lachesis.services.supervisor import forking as module
from lachesis.services.supervisor.child import ServiceProcess
from lachesis.services.supervisor.forking import ForkServers
from lachesis.services.supervisor.forkserver import ForkRequest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AWAY = ("--nats", "nats://127.0.0.1:9")
"""No server is there, for which a service waits at first."""


@asynccontextmanager
async def keeping(
    folder: Path, *arguments: str, services: tuple[str, ...] = ("trainer",), taken_over: bool = False
) -> AsyncIterator[ForkServers]:
    (folder / "logs").mkdir(exist_ok=True)
    servers = ForkServers((*arguments, "--set", f"folder={folder}"), services, folder)
    async with anyio.create_task_group() as tasks:
        assert await tasks.start(servers.keep_running) is taken_over
        yield servers
        tasks.cancel_scope.cancel()
    assert not waiting()
    assert not [file for file in folder.iterdir() if file.is_socket()]  # noqa: ASYNC240


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


def only(servers: ForkServers) -> module._ForkServerProcess:
    (server,) = servers._servers.values()
    return server


async def ready(servers: ForkServers) -> psutil.Process:
    await until(only(servers)._ready.is_set)
    return psutil.Process(only(servers).process.pid)


def told(folder: Path, service: str = "trainer") -> ForkRequest:
    return ForkRequest(service=service, part="", replica=1, log=str(folder / "service.log"), limit_s=5.0)


async def forked(servers: ForkServers, folder: Path, service: str = "trainer") -> tuple[ServiceProcess, psutil.Process]:
    process = await servers.fork(told(folder, service))
    assert process is not None
    return process, psutil.Process(process.pid)


def server_of(child: psutil.Process) -> int:
    """Return the pid of the fork server of a service: the parent of its reaper."""
    reaper = child.parent()
    assert reaper is not None
    return reaper.ppid()


async def hold(child: psutil.Process) -> None:
    """Keep a fork from ending, as it will when it has waited for a server for long enough."""
    await until(lambda: child.cmdline()[0].startswith("lachesis run"))
    child.suspend()


async def end(process: ServiceProcess) -> int:
    with anyio.fail_after(150):
        process.send_signal(signal.SIGKILL)
        return await process.wait()


async def test_a_fork_is_what_it_is_told_and_its_exit_code_is_known(tmp_path: Path) -> None:
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        lives = [await forked(servers, tmp_path) for _ in range(2)]
        assert {server_of(child) for _, child in lives} == {server.pid}
        title = f"lachesis run trainer --nats nats://127.0.0.1:9 --set folder={tmp_path}"
        await until(lambda: {" ".join(child.cmdline()).rstrip() for _, child in lives} == {title})
        assert await end(lives[0][0]) == -signal.SIGKILL
        with anyio.fail_after(150):
            assert await lives[1][0].wait() == EXIT_STARTUP  # there is no server, which it says where it was set to
    said = (tmp_path / "service.log").read_text()
    assert "trainer" in said
    assert "nats://127.0.0.1:9" in said


async def test_a_fork_ends_with_its_supervisor(tmp_path: Path) -> None:
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        process, child = await forked(servers, tmp_path)
        only(servers)._requests.shutdown(2)  # as when the supervisor is killed: this, and the pipe
        assert process._stdin is not None
        os.close(process._stdin)
        process._stdin = os.open(os.devnull, os.O_RDONLY)
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        await until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)  # no process has come
        assert "the supervisor is gone" in (tmp_path / "service.log").read_text()
        await process.wait()


async def test_a_server_that_is_killed_is_replaced_and_its_children_live_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    async with keeping(tmp_path, *AWAY) as servers:
        first = await ready(servers)
        process, child = await forked(servers, tmp_path)
        await hold(child)
        first.kill()
        await until(lambda: only(servers).process.pid != first.pid)
        other, sibling = await forked(servers, tmp_path)  # once the next one has imported all
        assert server_of(sibling) == only(servers).process.pid
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
        patch.setattr(module, "_RETRY_S", 0.0)
        async with keeping(tmp_path, *AWAY) as servers:
            first = await ready(servers)
            process, child = await forked(servers, tmp_path)
            await hold(child)
            module_file.write_text("import json")
            assert await servers.fork(told(tmp_path)) is None
            assert first.is_running(), "it has a child, whose end it is to tell"
            await until(lambda: only(servers).process.pid != first.pid)
            other, sibling = await forked(servers, tmp_path)
            assert server_of(sibling) != first.pid
            assert await end(process) == -signal.SIGKILL
            await until(lambda: not first.is_running())
            await end(other)
    assert "ended" not in caplog.text


_DRAWING = """
import atexit

def draw():
    import numpy, random, torch
    print("drew", random.random(), numpy.random.random(), torch.rand(()).item())

atexit.register(draw)
"""


async def test_no_two_forks_draw_the_same_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "drawing"
    package.mkdir()
    (package / "sitecustomize.py").write_text(_DRAWING)
    monkeypatch.setenv("PYTHONPATH", str(package))
    async with keeping(tmp_path, *AWAY) as servers:
        await ready(servers)
        lives = [await forked(servers, tmp_path) for _ in range(2)]
        for process, _ in lives:
            with anyio.fail_after(150):
                assert await process.wait() == EXIT_STARTUP
    said = (tmp_path / "service.log").read_text().splitlines()
    drawn = [line.split()[1:] for line in said if line.startswith("drew")]
    assert len(drawn) == len(lives)
    for one, other in zip(*drawn, strict=True):
        assert one != other


async def test_each_service_is_forked_by_its_own_kind(tmp_path: Path) -> None:
    async with keeping(tmp_path, services=("trainer", "batcher")) as servers:
        await until(lambda: sum(server._ready.is_set() for server in servers._servers.values()) == 2)
        kinds = {kind: server.process.pid for kind, server in servers._servers.items()}
        for service, kind in (("batcher", "plain"), ("inference", "torch")):
            process, child = await forked(servers, tmp_path, service)
            assert server_of(child) == kinds[kind]
            await end(process)
        assert await servers.fork(told(tmp_path, "gateway")) is None


_SUPERVISOR = f"""
import os, sys, anyio
from pathlib import Path
os.putenv("UNSEEN", "1")  # not in os.environ, as what readline sets
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from integration.test_forkserver import keeping, ready

async def keep():
    async with keeping(Path(sys.argv[1]), *sys.argv[3:], taken_over=sys.argv[2] == "1") as servers:
        print((await ready(servers)).pid, flush=True)
        await anyio.sleep_forever()

anyio.run(keep)
"""


async def left_by_a_killed_supervisor(folder: Path, *, taken_over: bool = False) -> psutil.Process:
    """Return a fork server whose supervisor was killed."""
    command = [sys.executable, "-c", _SUPERVISOR, str(folder), str(int(taken_over)), *AWAY]
    async with await anyio.open_process(command, stderr=None, env=os.environ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(await supervisor.stdout.receive())
        supervisor.kill()
    return psutil.Process(pid)


async def test_the_server_of_a_killed_supervisor_is_taken_over(tmp_path: Path) -> None:
    left = await left_by_a_killed_supervisor(tmp_path)
    async with keeping(tmp_path, *AWAY, taken_over=True) as servers:
        assert (await ready(servers)).pid == left.pid
        process, child = await forked(servers, tmp_path)
        assert server_of(child) == left.pid
        assert await end(process) == -signal.SIGKILL
        other, _ = await forked(servers, tmp_path)
        assert await end(other) == -signal.SIGKILL
    await until(lambda: not left.is_running())


async def test_a_server_that_was_started_otherwise_is_left_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = await left_by_a_killed_supervisor(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        assert server.pid != left.pid
        assert server.environ()["OMP_NUM_THREADS"] == "3"
    await until(lambda: not left.is_running())


async def test_a_server_of_other_limits_is_left_to_its_end(tmp_path: Path) -> None:
    left = await left_by_a_killed_supervisor(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        async with keeping(tmp_path, *AWAY) as servers:
            assert only(servers).process.pid != left.pid
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_whoever_takes_over_may_be_killed_too(tmp_path: Path) -> None:
    first = await left_by_a_killed_supervisor(tmp_path)
    assert (await left_by_a_killed_supervisor(tmp_path, taken_over=True)).pid == first.pid
    async with keeping(tmp_path, *AWAY, taken_over=True) as servers:
        assert (await ready(servers)).pid == first.pid


async def test_without_a_door_a_server_ends_with_its_supervisor(tmp_path: Path) -> None:
    (tmp_path / "forkserver-torch.sock").mkdir()  # as on a file system without sockets: none can be bound there
    left = await left_by_a_killed_supervisor(tmp_path)
    await until(lambda: not left.is_running())
    async with keeping(tmp_path, *AWAY) as servers:
        server = await ready(servers)
        process, child = await forked(servers, tmp_path)
        assert server_of(child) == server.pid
        assert await end(process) == -signal.SIGKILL
    assert "cannot take over" in (tmp_path / "logs" / "forkserver.log").read_text()


async def test_other_arguments_are_another_server(tmp_path: Path) -> None:
    left = await left_by_a_killed_supervisor(tmp_path)
    async with keeping(tmp_path, *AWAY, "--set", "seed=1") as servers:
        assert only(servers).process.pid != left.pid
