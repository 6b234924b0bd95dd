"""Servers as one's own would be, with a key for each identity, and the helpers of the stages' unit tests."""

import importlib.util
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from integration.security.secured import Secured, auth_init, make_certificates
from outside import mark_below

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import StreamsConfig

RUN = """
run = "one"
[environments.words]
kind = "reasoning_gym"
[environments.far]
kind = "gateway"
[evaluation.held]
kind = "reasoning_gym"
"""


@pytest.fixture(scope="session")
def secured_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what such servers of the runs `one` and `two` are configured with; each server takes a copy."""
    folder = tmp_path_factory.mktemp("secured files")
    make_certificates(folder)
    auth_init(folder, "--cert", str(folder / "server.pem"), "--key", str(folder / "server.key"), config=RUN)
    auth_init(folder, config=RUN.replace("one", "two"))
    return folder


@pytest.fixture(scope="session")
def make_secured(
    tmp_path_factory: pytest.TempPathFactory, secured_files: Path, anyio_backend: str, streams_config: StreamsConfig
) -> Callable[[], AbstractAsyncContextManager[Secured]]:
    """Makes two runs, `one` and `two`, in their accounts on a server with TLS; the streams of `one` are there."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Secured]:
        folder = tmp_path_factory.mktemp("secured")
        shutil.copytree(secured_files, folder, dirs_exist_ok=True)
        written = (folder / "tls.conf").read_text().replace(str(secured_files), str(folder))
        (folder / "tls.conf").write_text(
            written.replace("tls {", "tls {\n  timeout: 30")
        )  # a busy machine's handshakes
        async with Secured(folder, "one") as server:
            async with await server.bus("operator") as bus:
                await bus.ensure_streams(streams_config)
            yield server

    return make


@pytest.fixture(scope="session")
async def shared_server(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> AsyncIterator[Secured]:
    """The server that modules of tests take from one another."""
    async with make_secured() as server:
        yield server


@pytest.fixture(scope="module")
async def secured(shared_server: Secured, streams_config: StreamsConfig) -> AsyncIterator[Secured]:
    """The shared server, whose streams a module leaves as they were; one that deletes or changes any makes its own."""
    yield shared_server
    async with await shared_server.bus(OPERATOR) as operator:
        assert await operator.ensure_streams(streams_config) == [], "these tests need a server of their own"


_spec = importlib.util.spec_from_file_location("stage_lab", Path(__file__).parents[2] / "unit" / "conftest.py")
_lab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_lab)


@pytest.fixture
def make_lab() -> object:
    """The helpers of the unit tests of stages, around any bus."""
    return _lab.Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here attacks a run."""
    mark_below(Path(__file__).parent, items, "hostile")
