"""Causes of standstill, injected one by one into a real run: said where, after how long, with which cause.

`PYTHONPATH=tests python tests/integration/standstill.py FOLDER [CAUSE...]` prints the table; `test_standstill.py` runs
some of them.
"""

from __future__ import annotations

import html
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import msgspec
import psutil
from integration.disk.conftest import SmallDisk
from integration.harness import Run
from integration.servers import Supervised

from lachesis.pipeline.notices.text import notice_line
from lachesis.schemas.notices import Notice
from lachesis.services.agent.tools import _status
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.run.notices_file import NOTICES_FILE, SavedNotices

__all__ = ["CAUSES", "Cause", "Outcome", "inject", "open_standing_run", "shown_everywhere"]

_SWITCHES = Path(__file__).parent / "standstill_switches.py"
_CONFIG = """
[environments.sums]
kind = "{switches}:Switched"
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[[scoring.raters]]
rater = "standstill_switches:letters"

[batching]
batch_size = 16
teacher = "optional"

[teacher]
enabled = true

[training]
checkpoint_every = 4

[flow]
lease_s = 3.0

[health]
act = "warn"

[services]
silent_s = 600.0

[streams]
rollouts_bytes = 67108864
events_bytes = 67108864
replay_bytes = 16777216
teacher_bytes = 67108864
ledger_bytes = 67108864
bucket_bytes = 4194304
"""


class Cause(NamedTuple):
    """`process` is stopped by SIGSTOP, `opens_none` may open no more files, `grows_none` may have no more memory,
    `switch` is on, or the run's small disk is full. `words`: of the line that tells of it."""

    name: str
    words: tuple[str, ...]
    process: str = ""
    opens_none: str = ""
    grows_none: str = ""
    switch: str = ""
    fills: bool = False
    is_brief: bool = False
    """Whether it ends the run before all commands could be looked at."""
    within_s: float = 10.0


class Outcome(NamedTuple):
    """After how many seconds a cause was said, in the run's folder and by `up`, and withdrawn; None: not at all."""

    cause: str
    said_s: float | None
    logged_s: float | None
    withdrawn_s: float | None
    line: str
    not_shown_by: list[str]


def _without_files(process: str) -> Cause:
    words = (process, "can open no more files", "ulimit -n")
    if process == "supervisor":  # which cannot write what holds: what reads its folder alone says that
        words = (process,)
    return Cause(f"{process} has no file descriptors", words, opens_none=process)


def _without_memory(process: str) -> Cause:
    words = (process, "can have no more memory", "address space", "ulimit -v")
    return Cause(f"{process} has no memory", words, grows_none=process)


def _frozen(process: str) -> Cause:
    name = "nats-server does not answer" if process == "nats-server" else f"{process} is silent"
    return Cause(f"SIGSTOP {process}", (name, "stopped", "kill -CONT"), process=process)


CAUSES = (
    *map(_frozen, ("batcher", "scorer", "governor", "trainer", "inference-policy", "environment-sums", "normalizer",
                   "teacher", "inference-teacher", "health", "curriculum", "nats-server")),
    Cause("a rater raises", ("scorer", "has a rating", "KeyError"), switch="rater raises"),
    Cause("all rewards are equal", ("no group was fit", "zero_variance"), switch="rewards are equal", within_s=60.0),
    Cause("the environment raises", ("groups in a row failed", "no such column"), switch="task raises", is_brief=True),
    Cause("the environment's process ends", ("environment-sums ended", "code 1"), switch="process ends", is_brief=True),
    Cause("a rater hangs", ("scorer", "rater letters"), switch="rater hangs"),
    Cause("the environment hangs", ("environment-sums is busy in", "task"), switch="task hangs", within_s=12.0),
    Cause("a rollout hangs in a thread", ("groups under way hang", "see where its rollouts wait"),
          switch="rollout hangs", within_s=12.0),
    *map(_without_files, ("supervisor", "environment-sums", "inference-policy")),
    *map(_without_memory, ("supervisor", "environment-sums", "inference-policy", "scorer")),
    Cause("the disk is full", ("the disk that holds", "is full", "make room"), fills=True),
)  # fmt: skip


@contextmanager
def open_standing_run(folder: Path) -> Iterator[Run]:
    """Yield a run that has begun to be started."""
    switches = folder / "switches"
    switches.mkdir(parents=True)
    environ = {"STANDSTILL_SWITCHES": str(switches)}
    run = Run(folder, 1000, Supervised(folder), environ=environ, sets={"training.steps": 100_000})
    run.config.write_text(_CONFIG.format(switches=_SWITCHES))
    with run:
        run.start()
        yield run


def notices_of(run: Run) -> list[Notice]:
    """Return what the run's supervisor says, or why it cannot."""
    try:
        return msgspec.json.decode((run.folder / NOTICES_FILE).read_bytes(), type=SavedNotices).notices
    except FileNotFoundError:
        return look_at_folder(run.folder.name, run.folder).notices


async def inject(run: Run, cause: Cause, gone_within_s: float = 60.0, *, look: bool = False) -> Outcome:
    """Bring a cause about, see when it is said, end it, and see when that is withdrawn.

    `look`: see whether every command shows it, too.
    """
    logged_before = (run.folder / "up.log").stat().st_size
    with _brought_about(run, cause):
        said_s = await _seconds_until(lambda: bool(_lines(run, cause)), cause.within_s + 20)
        line = (_lines(run, cause) or [""])[0]
        logged_s = await _seconds_until(lambda: _is_logged(run, cause, logged_before), 3.0)
        shown = await anyio.to_thread.run_sync(shown_everywhere, run, cause.words) if look else {}
    withdrawn_s = await _seconds_until(lambda: not _lines(run, cause), gone_within_s)
    logged = None if said_s is None or logged_s is None else said_s + logged_s
    return Outcome(cause.name, said_s, logged, withdrawn_s, line, [name for name in shown if not shown[name]])


async def healthy(run: Run, deadline_s: float = 120.0) -> None:
    """Wait until nothing stops the run, and a step is taken."""
    with anyio.fail_after(deadline_s):
        while any(one.stops for one in notices_of(run)):  # noqa: ASYNC110 - it is about other processes, which offer nothing to wait on
            await anyio.sleep(0.2)
    await run.wait_for_step(run.step() + 1, deadline_s)


def shown_everywhere(run: Run, words: Sequence[str]) -> dict[str, bool]:
    """Return by command whether it shows a notice with these words, and whether the page and the agent's tool do."""
    commands = {
        "status": ("status",),
        "health": ("health",),
        "top": ("top", "--once", "--window", "2"),
        "runs show": ("runs", "show"),
    }
    found = {}
    for name, command in commands.items():
        done = subprocess.run(
            [sys.executable, "-m", "lachesis", *command, *run.arguments],
            capture_output=True, text=True, env=run.environ, timeout=120, check=False,
        )  # fmt: skip
        found[name] = done.stdout
    found["rl_check_status"] = "\n".join(_status(look_at_folder(run.folder.name, run.folder))["notices"])
    found["page"] = _page(run)
    return {name: all(word in " ".join(text.split()) for word in words) for name, text in found.items()}


def _page(run: Run) -> str:
    """Return what the page shows: by a browser where there is one, else what it is given."""
    process = run.spawn("web", log=subprocess.PIPE)
    assert process.stdout is not None
    try:
        url = next(line for line in map(bytes.decode, process.stdout) if line.startswith("http")).strip()
        browser = shutil.which("chromium")
        if browser is None:
            with httpx.Client(base_url=url.partition("?")[0], timeout=60, trust_env=False) as client:
                client.get(url)
                return "\n".join(one["text"] for one in client.get("/api/run").json()["notices"])
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
                    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=8000"),
                    *(f"--user-data-dir={profile}", "--dump-dom", f"{url}#/"),
                ],
                capture_output=True, check=True, timeout=120,
            )  # fmt: skip
        return html.unescape(done.stdout.decode())
    finally:
        process.terminate()
        process.communicate()  # which closes the pipes


@contextmanager
def _brought_about(run: Run, cause: Cause) -> Iterator[None]:
    switch = run.folder / "switches" / cause.switch
    pid = run.pids().get(cause.process or cause.opens_none or cause.grows_none)
    kind = resource.RLIMIT_AS if cause.grows_none else resource.RLIMIT_NOFILE
    before = (0, 0) if pid is None else resource.prlimit(pid, kind)
    if pid is not None:
        if cause.process:
            os.kill(pid, signal.SIGSTOP)
        else:
            limit = psutil.Process(pid).memory_info().vms if cause.grows_none else 8
            resource.prlimit(pid, kind, (limit, before[1]))
    elif cause.fills:
        SmallDisk(run.folder).fill()
    else:
        assert cause.switch, f"{cause} names a process that does not run"
        switch.touch()
    try:
        yield
    finally:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                resource.prlimit(pid, kind, before)
        elif cause.fills:
            SmallDisk(run.folder).free()
        else:
            switch.unlink()


def _lines(run: Run, cause: Cause) -> list[str]:
    lines = [f"{one.source}: {notice_line(one)}" for one in notices_of(run)]
    return [line for line in lines if all(word in line for word in cause.words)]


def _is_logged(run: Run, cause: Cause, before: int) -> bool:
    lines = (run.folder / "up.log").read_bytes()[before:].decode(errors="replace").splitlines()
    return any(all(word in line for word in cause.words) for line in lines)


async def _seconds_until(condition: Callable[[], bool], most_s: float) -> float | None:
    began = anyio.current_time()
    with anyio.move_on_after(most_s):
        while not condition():  # noqa: ASYNC110 - as above
            await anyio.sleep(0.1)
        return anyio.current_time() - began
    return None


async def _campaign(folder: Path, causes: Sequence[Cause]) -> None:
    with open_standing_run(folder) as run:
        await run.wait_for_step(3)
        for cause in causes:
            try:
                await healthy(run)
            except (TimeoutError, AssertionError) as error:
                print(f"not healthy before {cause.name}: {[notice_line(one) for one in notices_of(run)]} {error}"[:500])
            print(json.dumps(await inject(run, cause, look=not cause.is_brief)), flush=True)


if __name__ == "__main__":
    chosen = [one for one in CAUSES if not sys.argv[2:] or any(name in one.name for name in sys.argv[2:])]
    if not Path(sys.argv[1]).is_mount():
        print("left out, since the folder is no small disk of its own:", [one.name for one in chosen if one.fills])
        chosen = [one for one in chosen if not one.fills]
    anyio.run(_campaign, Path(sys.argv[1]), chosen)
