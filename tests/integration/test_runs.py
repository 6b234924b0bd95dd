"""`lachesis runs` as a person uses it: a run without a terminal, killed, adopted, stopped and started many times."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from integration.harness import CONFIG, SUMS
from integration.test_up import CONFIG as IDLE

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.services.run.connect import NATS_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Shell:
    """A folder in which somebody calls `lachesis`; every process of theirs has `folder` in its environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        places = {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(self.temporary)}
        self.environ = {**os.environ, **places, "PYTHONPATH": path}

    async def call(self, *command: str, fails: bool = False) -> str:
        """Return what a command prints; where it `fails`, its error."""
        done = await anyio.run_process(
            [sys.executable, "-m", "lachesis", *command], cwd=self.folder, env=self.environ, check=False,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        assert done.returncode == (2 if fails else 0), (done.stdout + done.stderr).decode()
        return (done.stderr if fails else done.stdout).decode()

    async def show(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self.call("runs", "show", "--run", "up", "--json"))
        return found

    async def until(self, state: str, but: int = 0) -> dict[str, Any]:
        """Wait until the run is in a state, with another supervisor than `but`."""
        with anyio.fail_after(120):
            while True:
                found = await self.show()
                if found["state"] == state and found["supervisor"] != but:
                    return found

    def processes(self) -> list[psutil.Process]:
        """Return those of this shell that run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("XDG_STATE_HOME") == str(self.folder / "state"):
                    found.append(process)
            except psutil.Error:
                continue
        return [process for process in found if process.pid != os.getpid()]

    async def gone(self) -> bool:
        """Wait until no process is left, for as long as services may drain."""
        _, alive = await anyio.to_thread.run_sync(lambda: psutil.wait_procs(self.processes(), timeout=30))
        return not alive

    async def stored(self) -> dict[str, int]:
        """Return the streams of the run, with how many consumers each has."""
        endpoint = read_endpoint(self.folder / "runs/up" / NATS_FOLDER)
        async with await connect(endpoint.url, run="up", name="test", token=endpoint.token) as bus:
            infos = await bus.client.jetstream().streams_info()
        return {str(info.config.name): info.state.consumer_count for info in infos}


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "up.toml").write_text(IDLE)
    shell = Shell(tmp_path)
    yield shell
    for process in shell.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


async def test_a_killed_supervisor_is_started_again_and_the_run_goes_on(shell: Shell) -> None:
    said = await shell.call("runs", "start", "--config", "up.toml")
    assert "run up is running: 7 of 7 processes ready" in said
    first = await shell.show()
    assert (first["state"], first["mode"], first["environments"]) == ("running", "observe", ["words"])
    assert "run up is running already" in await shell.call("runs", "start", "up", fails=True)
    os.kill(first["supervisor"], signal.SIGKILL)
    second = await shell.until("running", but=first["supervisor"])
    assert json.loads(await shell.call("status", "--run", "up", "--json"))["run"] == "up"
    keeper = json.loads((shell.folder / "runs/up/keeper.json").read_bytes())["pid"]
    os.kill(keeper, signal.SIGKILL)  # the run does not need it
    assert (await shell.show())["state"] == "running"
    assert "(pid" not in await shell.call("runs", "stop", "up")
    assert await shell.gone()
    found = await shell.show()
    assert (found["state"], found["supervisor"]) == ("stopped", None)
    assert found["started_ns"] == second["started_ns"]
    assert "it is stopped" in await shell.call("runs", "stop", "up", fails=True)
    assert "supervisor: " in await shell.call("runs", "logs", "up", "-f")  # and ends, as the run has


async def test_a_run_of_which_everything_was_killed_is_started_again(shell: Shell) -> None:
    await shell.call("runs", "start", "--config", "up.toml")
    processes = shell.processes()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)
    assert (await shell.show())["state"] == "interrupted"
    assert "killed, or the machine restarted" in await shell.call("runs", "stop", "up", fails=True)
    await shell.call("runs", "start", "up")
    await shell.call("runs", "stop", "up", "--now")
    assert await shell.gone()


async def test_what_keeps_a_run_from_starting_is_said_and_nothing_is_left(shell: Shell) -> None:
    broken = 'scoring.raters=[{rater="nope"}]'
    said = await shell.call("runs", "start", "--config", "up.toml", "--set", broken, fails=True)
    assert "scoring.raters[0].rater: 'nope' is no built-in one" in said
    assert not (shell.folder / "runs/up").exists()
    await shell.call("runs", "start", "--config", "up.toml")
    await shell.call("runs", "stop", "up")
    await shell.call("runs", "start", "up", "--set", broken, fails=True)
    assert "nope" not in (shell.folder / "runs/up/run.toml").read_text()  # the next start is as the last one
    assert "there is no run nosuch" in await shell.call("runs", "show", "nosuch", fails=True)
    assert await shell.gone()


async def test_starts_and_stops_leave_nothing_behind(shell: Shell) -> None:
    consumers: list[dict[str, int]] = []
    for _ in range(4):
        await shell.call("runs", "start", *(("up",) if consumers else ("--config", "up.toml")))
        consumers.append(await shell.stored())
        port = int(read_endpoint(shell.folder / "runs/up" / NATS_FOLDER).url.rpartition(":")[2])
        await shell.call("runs", "stop", "up")
        assert await shell.gone()
        with pytest.raises(OSError, match=r"All connection attempts failed|refused"):
            await anyio.connect_tcp("127.0.0.1", port)
    assert consumers[1] == consumers[-1]
    assert list(shell.temporary.iterdir()) == []
    await shell.call("runs", "delete", "up", "--yes")
    assert json.loads(await shell.call("runs", "list", "--json")) == []


async def test_a_run_trains_without_a_terminal_and_its_results_are_shown(shell: Shell) -> None:
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), shell.folder / "model")
    (shell.folder / "run.toml").write_text(f'run = "up"\nmodel = "model"\n{CONFIG.format(sums=SUMS, steps=4)}')
    await shell.call("runs", "start", "--config", "run.toml", "--no-wait")
    found = await shell.until("finished")
    assert (found["step"], found["steps"]) == (4, 4)
    assert {"mean", "success", "raters"} <= set(found["rewards"]["sums"])
    (results,) = json.loads(await shell.call("runs", "results", "up", "--json"))
    assert (results["state"], results["step"]) == ("finished", 4)
    assert results["sequences"] == 64
    assert Path(results["checkpoint"]).name == "step-00000004"
    assert "held out sums, first" in await shell.call("runs", "results", "up", "up")
    assert "finished" in await shell.call("runs", "list")
    assert await shell.gone()
