"""Causes of standstill, injected one by one into a real run: said where, after how long, with which cause.

`PYTHONPATH=tests python tests/integration/standstill.py FOLDER [CAUSE...]` prints a line for each (`Outcome`);
`test_standstill.py` runs some of them.
"""

from __future__ import annotations

import argparse
import html
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import msgspec
from integration.harness import Run
from integration.odd_server import open_odd_server
from integration.servers import Supervised
from integration.standstill_causes import CAUSES, Cause, StandingRun

from lachesis.pipeline.notices.text import notice_line
from lachesis.schemas.notices import Notice
from lachesis.services.agent.tools import _status
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.run.notices_file import NOTICES_FILE, SavedNotices

__all__ = ["Outcome", "healthy", "inject", "notices_of", "open_standing_run", "shown_everywhere"]

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


class Outcome(NamedTuple):
    """After how many seconds a cause was said, in the run's folder and by `up`, and withdrawn; None: not at all."""

    cause: str
    said_s: float | None
    logged_s: float | None
    withdrawn_s: float | None
    line: str
    not_shown_by: list[str]


@asynccontextmanager
async def open_standing_run(folder: Path) -> AsyncIterator[StandingRun]:
    """Yield a run that has begun to be started."""
    switches = folder / "switches"
    switches.mkdir(parents=True)
    environ = {"STANDSTILL_SWITCHES": str(switches)}
    own, odd = _free_port(), _free_port()
    sets = {
        "training.steps": 100_000,
        "inference.policy.port": own,
        "inference.policy.advertise": f"http://127.0.0.1:{odd}",
    }
    run = Run(folder, 1000, Supervised(folder), environ=environ, sets=sets)
    run.config.write_text(_CONFIG.format(switches=_SWITCHES))
    async with open_odd_server(f"http://127.0.0.1:{own}", odd) as server:
        with run:
            run.start()
            yield StandingRun(run, server)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def notices_of(run: Run) -> list[Notice]:
    """Return what the run's supervisor says, or why it cannot."""
    try:
        return msgspec.json.decode((run.folder / NOTICES_FILE).read_bytes(), type=SavedNotices).notices
    except FileNotFoundError:
        return look_at_folder(run.folder.name, run.folder).notices


async def inject(standing: StandingRun, cause: Cause, gone_within_s: float = 60.0, *, look: bool = False) -> Outcome:
    """Bring a cause about, see when it is said, end it, and see when that is withdrawn.

    `look`: see whether every command shows it, too.
    """
    run = standing.run
    logged_before = (run.folder / "up.log").stat().st_size
    async with cause.brought_about(standing):
        said_s = await _seconds_until(lambda: bool(_lines(run, cause)), cause.within_s + 20)
        line = (_lines(run, cause) or [""])[0]
        if said_s is None:
            line = f"SAID INSTEAD: {[notice_line(one) for one in notices_of(run)]}"
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

    def printed(command: tuple[str, ...]) -> str:
        return subprocess.run(
            [sys.executable, "-m", "lachesis", *command, *run.arguments],
            capture_output=True, text=True, env=run.environ, timeout=240, check=False,
        ).stdout  # fmt: skip

    with ThreadPoolExecutor(len(commands)) as threads:
        found = dict(zip(commands, threads.map(printed, commands.values()), strict=True))
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


async def _campaign(folder: Path, causes: Sequence[Cause], look_every: int) -> None:
    async with open_standing_run(folder) as standing:
        run = standing.run
        await run.wait_for_step(3)
        for number, cause in enumerate(causes):
            if run.process is None or run.process.poll() is not None:
                sys.exit(f"the run ended before {cause.name}:\n{run.tail()}")
            try:
                await healthy(run)
            except (TimeoutError, AssertionError) as error:
                print(f"not healthy before {cause.name}: {[notice_line(one) for one in notices_of(run)]} {error}"[:500])
            look = number % look_every == 0 and not cause.is_brief
            print(json.dumps(await inject(standing, cause, look=look)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the run's folder: a small disk, or some causes are left out")
    parser.add_argument("cause", nargs="*", help="part of the name of a cause; default: all")
    parser.add_argument("--look-every", type=int, default=1, help="see whether all commands show every Nth cause")
    arguments = parser.parse_args()
    chosen = [one for one in CAUSES if not arguments.cause or any(name in one.name for name in arguments.cause)]
    if not arguments.folder.is_mount():
        print("left out, since the folder is no small disk of its own:", [one.name for one in chosen if one.needs_disk])
        chosen = [one for one in chosen if not one.needs_disk]
    anyio.run(_campaign, arguments.folder, chosen, arguments.look_every)


if __name__ == "__main__":
    main()
