"""A run of hand-fed services: a real server in the run's folder, and services as processes of their own beside it."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat

SUMS = Path(__file__).parents[2] / "examples" / "sums.py"


class Site:
    """A run's folder, where its server keeps its store in `nats`, and processes that work on it."""

    def __init__(self, folder: Path, streams: StreamsConfig, run: str) -> None:
        self.folder = folder
        self.store = folder / "nats"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._streams = streams
        self._run = run

    @asynccontextmanager
    async def server(self) -> AsyncIterator[NatsBus]:
        """Run the server on the store; when it stops the store may be copied."""
        async with (
            EmbeddedServer(self.store, ServerConfig(max_file_bytes=4 << 30)) as server,
            await connect(server.url, run=self._run, name="tests", token=server.token) as bus,
        ):
            await bus.ensure_streams(self._streams)
            yield bus

    def start(
        self, config: str, *arguments: str, program: tuple[str, ...] = ("-m", "lachesis")
    ) -> subprocess.Popen[bytes]:
        """Start `lachesis run ...` with a configuration; what it says goes to a file of its own."""
        file = self.folder / "run.toml"
        file.write_text(config)
        with self.log(len(self.processes)).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *program, "run", *arguments, "--config", str(file), "--set", f"folder={self.folder}"],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def log(self, number: int) -> Path:
        return self.folder / f"process-{number}.log"

    def said(self, process: subprocess.Popen[bytes]) -> str:
        return self.log(self.processes.index(process)).read_text()

    async def ready(self, bus: Bus, run: str, *processes: subprocess.Popen[bytes]) -> None:
        """Wait until all of them do their work."""
        missing = {process.pid for process in processes}
        with anyio.fail_after(180):
            async with bus.listen(subjects.heartbeat(run)) as beats:
                while missing:
                    for process in processes:
                        assert process.poll() is None, self.said(process)
                    with anyio.move_on_after(1):
                        beat = decode(Heartbeat, (await anext(beats)).data)
                        if beat.stage.state == "ok":
                            missing.discard(beat.pid)

    async def ended(self, *processes: subprocess.Popen[bytes]) -> list[subprocess.Popen[bytes]]:
        """Wait until at least one of them has ended and return those that have."""
        with anyio.fail_after(180):
            found: list[subprocess.Popen[bytes]] = []
            while not found:
                await anyio.sleep(0.02)
                found = [process for process in processes if process.poll() is not None]
        return found

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


@pytest.fixture
def site(tmp_path: Path, streams_config: StreamsConfig, run_name: str) -> Iterator[Site]:
    folder = tmp_path / "a run"
    folder.mkdir()
    it = Site(folder, streams_config, run_name)
    try:
        yield it
    finally:
        it.stop()


@pytest.fixture
def copy_of(streams_config: StreamsConfig, run_name: str) -> Iterator[object]:
    """Make another site with a copy of a stopped server's store."""
    sites: list[Site] = []

    def copy(site: Site, name: str) -> Site:
        folder = site.folder.with_name(name)
        shutil.copytree(site.folder, folder)
        sites.append(Site(folder, streams_config, run_name))
        return sites[-1]

    yield copy
    for it in sites:
        it.stop()


_spec = importlib.util.spec_from_file_location("stage_lab", Path(__file__).parents[2] / "unit" / "conftest.py")
_lab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_lab)


@pytest.fixture
def make_lab():
    """The helpers of the unit tests of stages, around any bus."""
    return _lab.Lab
