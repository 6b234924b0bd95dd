"""`lachesis up` as a person runs it: everything comes up, stops in order, and nothing is left behind."""

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.services.supervisor.restarts import MAX_FAILURES

CONFIG = """
run = "up"
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
kind = "reasoning_gym"
params = {dataset = "spell_backward"}
"""
NAMES = {"governor", "batcher", "normalizer", "curriculum", "health", "scorer", "environment-words", "supervisor"}
"""The run's processes, but for a server of its own."""

STRAYS = """
import os, subprocess
from pathlib import Path
from lachesis import Environment, Task

class Strays(Environment):
    def __init__(self, dataset: str) -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
        (Path(__file__).parent / "strays" / str(child)).touch()

    def __len__(self) -> int:
        return 100

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="say")

    def reward(self, task, session) -> float:
        return 0.0
"""
"""An environment that leaves a process behind, in a session of its own, wherever it is loaded."""


async def start(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    (folder / "run.toml").write_text(CONFIG)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lachesis", "up", "--config", "run.toml", *arguments,
        cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def ready(up: asyncio.subprocess.Process) -> str:
    """Read what it says until all is ready."""
    assert up.stdout is not None
    said = b""
    with anyio.fail_after(150):
        while b"processes are ready" not in said:
            line = await up.stdout.readline()
            assert line, said.decode()
            said += line
    return said.decode()


def pids(folder: Path) -> dict[str, int]:
    found: dict[str, int | None] = json.loads((folder / "runs/up/pids.json").read_bytes())
    return {name: pid for name, pid in found.items() if pid is not None}


async def all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(processes, timeout=60))
    return not alive


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # other tests have runs of the same name
    folder = tmp_path / "with a space"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_everything_comes_up_as_processes_and_stops_in_order(folder: Path) -> None:
    up = await start(folder)
    said = await ready(up)
    running = pids(folder)
    assert running.keys() == NAMES | {"nats-server"}
    assert len(set(running.values())) == len(running)
    assert all(f"ready: {name}, pid {running[name]}" in said for name in NAMES - {"supervisor"})
    processes = [psutil.Process(pid) for pid in running.values()]
    importing = next(one for one in psutil.Process(running["batcher"]).parents() if "forkserver" in one.cmdline())
    assert importing.create_time() <= psutil.Process(running["nats-server"]).create_time(), "it imports meanwhile"
    (folder / "run.toml").unlink()  # the services, and the caller by the run's name, use the one in its folder
    away = folder / "away"
    away.mkdir()
    command = [sys.executable, "-m", "lachesis", "status", "--run", "up", "--json"]
    status = json.loads((await anyio.run_process(command, cwd=away)).stdout)
    assert {row["service"] for row in status["services"]} == NAMES - {"supervisor"}
    assert load(run_config_type(), file=folder / "runs/up/run.toml").config.path == folder / "runs/up"
    up.send_signal(signal.SIGTERM)
    with anyio.fail_after(90):
        said_last, _ = await up.communicate()
    assert up.returncode == 0
    assert await all_gone(processes)
    assert f"summary in {folder / 'runs/up/summary.json'}" in said_last.decode()
    assert json.loads((folder / "runs/up/summary.json").read_bytes())["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_nothing_outlives_a_killed_supervisor_and_a_second_one_goes_on(folder: Path) -> None:
    (folder / "strays.py").write_text(STRAYS)
    (folder / "strays").mkdir()
    up = await start(folder, "--set", "environments.words.kind=strays.py:Strays")
    await ready(up)
    processes = [psutil.Process(pid) for name, pid in pids(folder).items() if name != "supervisor"]
    psutil.Process(pids(folder)["batcher"]).suspend()
    up.kill()
    await up.communicate()
    assert await all_gone(processes)
    strays = [int(file.name) for file in (folder / "strays").iterdir()]
    assert strays
    assert await all_gone([psutil.Process(pid) for pid in strays if psutil.pid_exists(pid)])
    again = await start(folder)
    await ready(again)
    second = await start(folder)
    said, _ = await second.communicate()
    assert second.returncode == 2
    assert b"another supervisor runs in" in said
    os.kill(again.pid, signal.SIGINT)
    with anyio.fail_after(90):
        await again.communicate()
    assert again.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_store_deleted_under_the_run_ends_it_and_the_next_start_refuses_to_begin_anew(folder: Path) -> None:
    up = await start(folder)
    await ready(up)
    run = folder / "runs/up"
    shutil.rmtree(run / "nats/jetstream", ignore_errors=True)  # files come and go in it
    with anyio.fail_after(90):
        said, _ = await up.communicate()
    assert up.returncode == 2, said.decode()
    assert f"{run}/nats/jetstream was deleted, moved or replaced under the running run" in said.decode()
    for lost in ("none of the streams of run up is there any more", "and that is gone: the folder was deleted"):
        again = await start(folder)
        said, _ = await again.communicate()
        assert again.returncode == 2
        assert lost in said.decode()
        assert "`lachesis runs delete up`" in said.decode()
        if run.exists():
            shutil.rmtree(run)
    command = [sys.executable, "-m", "lachesis", "runs", "delete", "up", "--yes"]
    assert (await anyio.run_process(command, cwd=folder, check=False)).returncode == 0
    anew = await start(folder)
    await ready(anew)
    shutil.rmtree(run, ignore_errors=True)  # with all that it writes at the end
    with anyio.fail_after(90):
        said, _ = await anew.communicate()
    assert anew.returncode == 2, said.decode()
    assert f"{run}" in said.decode().partition("ERROR ")[2]
    assert "deleted, moved or replaced under the running run" in said.decode()
    assert "Traceback" not in said.decode()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_on_a_server_of_ones_own_a_process_killed_again_and_again_does_not_end_the_run(
    folder: Path, fresh_server: EmbeddedServer
) -> None:
    token = folder / "token"
    token.write_text(fresh_server.token)
    up = await start(folder, "--nats", fresh_server.url, "--set", f"nats.token_file={token}")
    said = await ready(up)
    running = pids(folder)
    assert running.keys() == NAMES
    assert all(f"ready: {name}, pid {running[name]}" in said for name in NAMES - {"supervisor"})
    processes = [psutil.Process(pid) for name, pid in running.items() if name != "scorer"]
    async with (
        await connect(fresh_server.url, run="up", name="test", token=fresh_server.token) as bus,
        bus.listen(subjects.heartbeat("up", "scorer")) as beats,
    ):
        struck: set[int] = set()
        last = 0
        with anyio.fail_after(600):
            async for message in beats:
                beat = decode(Heartbeat, message.data)
                if beat.pid in struck or beat.stage.state == "starting":
                    continue
                if len(struck) == MAX_FAILURES + 2:
                    break  # it is there again
                if beat.pid == last:  # its second, so that the supervisor has heard the first
                    os.kill(beat.pid, signal.SIGKILL)
                    struck.add(beat.pid)
                last = beat.pid
    assert up.returncode is None
    up.send_signal(signal.SIGTERM)
    with anyio.fail_after(90):
        said_last, _ = await up.communicate()
    assert up.returncode == 0
    assert await all_gone(processes)
    assert said_last.count(b"scorer ended with code -9 (killed from outside)") == MAX_FAILURES + 2
    assert all(f"scorer is ready again, pid {pid}\n".encode() in said_last for pid in struck - {running["scorer"]})
    assert json.loads((folder / "runs/up/summary.json").read_bytes())["state"] == "stopped"


_STUCK = """
import signal, sys
from pathlib import Path

if "forkserver" in sys.orig_argv:
    Path(sys.orig_argv[-3]).with_suffix(".stuck").touch()  # the door, before --config run.toml
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_import_is_waited_for_once_the_run_is_to_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "stuck"
    package.mkdir()
    (package / "sitecustomize.py").write_text(_STUCK)
    monkeypatch.setenv("PYTHONPATH", str(package))
    up = await start(folder)
    stuck = folder / "runs/up/forkserver-plain.stuck"
    with anyio.fail_after(150):
        while not stuck.exists():  # noqa: ASYNC110 - another process makes it
            await anyio.sleep(0.05)
    up.send_signal(signal.SIGINT)
    with anyio.fail_after(150):
        said, _ = await up.communicate()
    assert up.returncode == 0, said.decode()
    assert b"did not drain" not in said
