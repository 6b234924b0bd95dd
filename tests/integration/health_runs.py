"""A real scorer and a real health service over made rollouts, for tests of what health checks find."""

import hashlib
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas import subjects
from lachesis.schemas.alerts import Alert, AlertEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup


@asynccontextmanager
async def demo_bus(folder: Path) -> AsyncIterator[Bus]:
    """Serve the run `demo` of the folder's `run.toml`, with its streams."""
    store = folder / "runs" / "demo" / "nats"
    async with (
        EmbeddedServer(store, ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run="demo", name="tests", token=server.token) as bus,
    ):
        init = [sys.executable, "-m", "lachesis", "init", "--config", "run.toml", "--run", "demo"]
        await anyio.run_process(init, cwd=folder)
        yield bus


@asynccontextmanager
async def running(folder: Path, service: str) -> AsyncIterator[Process]:
    """Run a service as a process, which is killed at the end."""
    command = [sys.executable, "-m", "lachesis", "run", service, "--config", "run.toml", "--run", "demo"]
    async with await anyio.open_process(command, cwd=folder, stdout=None, stderr=None) as process:
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()


def group_id(env: str, number: int) -> str:
    """Return the same id in each run of a test: it decides which groups are excerpted, or rated for another task."""
    return hashlib.blake2b(f"{env} {number}".encode(), digest_size=16).hexdigest()


async def store_rollouts(bus: Bus, groups: Iterable[RolloutGroup]) -> None:
    for group in groups:
        headers = {PLAN_HEADER: Plan.of(group).pack()}
        await bus.publish(subjects.rollout("demo", group.env), encode(group), msg_id=group.id, headers=headers)


async def results_until(bus: Bus, env: str, groups: int, *checks: str) -> dict[str, list[Alert]]:
    """Return by check its results, window by window, once so many groups of the environment were checked."""
    found: dict[str, list[Alert]] = {check: [] for check in checks}
    with anyio.fail_after(120):
        async with bus.read(subjects.EVENTS, [subjects.event("alert", "demo", "live", env)]) as messages:
            async for message in messages:
                event = decode(AlertEvent, message.data)
                for result in event.results:
                    if result.check in found:
                        found[result.check].append(result)
                if event.groups >= groups:
                    return found
    raise AssertionError("the stream ended")
