"""Fixtures shared by every test: one real nats-server a session, and the bus in both its forms."""

import gc
import hashlib
import inspect
import os
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import msgspec
import pytest
from anyio._core._eventloop import reset_current_async_library, set_current_async_library
from hidden_gpu import hidden_gpu, pytest_collection_modifyitems, seen_gpu
from hypothesis import HealthCheck, settings
from integration.cluster.nodes import Cluster
from left_running import pytest_runtest_call, pytest_runtest_teardown
from passed_over import pytest_ignore_collect, pytest_itemcollected

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ServerConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.subjects import BUCKET, STREAMS

__all__ = [
    "hidden_gpu",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_itemcollected",
    "pytest_runtest_call",
    "pytest_runtest_teardown",
    "seen_gpu",
]

settings.register_profile(
    "patient",
    deadline=None,  # how long an example takes tells of the machine, not of the code
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,  # there, a failure is to tell of the change
)
settings.load_profile("patient")

# Torch, not imported yet, computes on one thread here and in all that tests start, as services do. If it had one for
# each core, those of several workers would wait for each other without sleeping, and cost many times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in the background of a shell; all that tests start would ignore Ctrl-C as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

TEST_STREAMS = StreamsConfig(
    rollouts_bytes=256 << 20,
    events_bytes=64 << 20,
    replay_bytes=16 << 20,
    teacher_bytes=64 << 20,
    ledger_bytes=64 << 20,
    calls_bytes=64 << 20,
    weights_bytes=64 << 20,
    bucket_bytes=32 << 20,
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare the garbage collector what is collected: millions of objects, all of which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests start is recorded in a folder of theirs, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_runs_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run whose configuration names no folder has one of its test, not one below the folder that pytest runs in.

    But for tests that have gone to a folder of theirs.
    """
    base, by_default, here = tmp_path_factory.mktemp("runs"), RunConfig.path.fget, Path.cwd()

    def path(config: RunConfig) -> Path:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        if Path.cwd() != here:
            return by_default(config)
        own = hashlib.sha256(test.encode()).hexdigest()[:12]
        return Path(config.folder or base / own / config.run).absolute()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunConfig, "path", property(path))
        yield


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _outside_of_loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a test that is no coroutine run an event loop of its own, also while that of the session's fixtures waits."""
    if inspect.iscoroutinefunction(request.function):
        yield
        return
    token = set_current_async_library(None)
    yield
    reset_current_async_library(token)


@pytest.fixture(scope="session")
def streams_config() -> StreamsConfig:
    """Small budgets, so that a test can fill a stream."""
    return TEST_STREAMS


@pytest.fixture(scope="session")
async def nats_server(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> AsyncIterator[EmbeddedServer]:
    """A server on a free loopback port with a store of its own; stopped, by its pid, with the session."""
    async with EmbeddedServer(tmp_path_factory.mktemp("nats"), ServerConfig(max_file_bytes=4 << 30)) as server:
        yield server


@pytest.fixture
async def fresh_server(tmp_path: Path, anyio_backend: str) -> AsyncIterator[EmbeddedServer]:
    """A server for this test alone, to be killed and frozen at will, on a path with a space."""
    async with EmbeddedServer(tmp_path / "nats store", ServerConfig(max_file_bytes=4 << 30)) as server:
        yield server


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """The run that the test's bus is opened for: the one that its module calls `RUN`."""
    named = getattr(request.module, "RUN", None)
    return named if isinstance(named, str) else "run"


@pytest.fixture
async def nats_bus(nats_server: EmbeddedServer, run_name: str) -> AsyncIterator[NatsBus]:
    """The bus over the session's server, with empty streams."""
    async with await connect(nats_server.url, run=run_name, name="tests", token=nats_server.token) as connected:
        await connected.ensure_streams(TEST_STREAMS)
        yield connected
        await delete_streams(connected)


async def delete_streams(bus: NatsBus) -> None:
    for kind in [*STREAMS, BUCKET]:
        await bus.delete_stream(kind)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three servers on loopback with stores of their own; killed, by their pids, with the session."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(params=["memory", "nats", pytest.param("cluster", marks=pytest.mark.slow)])
async def bus(request: pytest.FixtureRequest, nats_bus: NatsBus, run_name: str) -> AsyncIterator[Bus]:
    """The bus in memory, over a real server, and over a cluster that keeps three copies; with empty streams."""
    if request.param == "nats":
        yield nats_bus
    elif request.param == "cluster":
        async with await request.getfixturevalue("cluster").connect("tests", run=run_name) as replicated:
            await replicated.ensure_streams(msgspec.structs.replace(TEST_STREAMS, replicas=3))
            yield replicated
            await delete_streams(replicated)
    else:
        async with MemoryBus(max_bytes=TEST_STREAMS.budgets()) as memory:
            yield memory
