"""Servers as one's own would be, with a key for each identity, and the helpers of the stages' unit tests."""

import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from integration.security.secured import Secured, auth_init, make_certificates

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
def make_secured(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str, streams_config: object
) -> Callable[[], AbstractAsyncContextManager[Secured]]:
    """Makes two runs, `one` and `two`, in their accounts on a server with TLS; the streams of `one` are there."""

    @asynccontextmanager
    async def make() -> AsyncIterator[Secured]:
        folder = tmp_path_factory.mktemp("secured")
        make_certificates(folder)
        tls = ("--cert", str(folder / "server.pem"), "--key", str(folder / "server.key"))
        auth_init(folder, *tls, config=RUN)
        auth_init(folder, config=RUN.replace("one", "two"))
        written = (folder / "tls.conf").read_text()
        (folder / "tls.conf").write_text(
            written.replace("tls {", "tls {\n  timeout: 30")
        )  # a busy machine's handshakes
        async with Secured(folder, "one") as server:
            async with await server.bus("operator") as bus:
                await bus.ensure_streams(streams_config)
            yield server

    return make


@pytest.fixture(scope="session")
async def secured(make_secured: Callable[[], AbstractAsyncContextManager[Secured]]) -> AsyncIterator[Secured]:
    """One server for the tests that only ask it what it allows."""
    async with make_secured() as server:
        yield server


_spec = importlib.util.spec_from_file_location("stage_lab", Path(__file__).parents[2] / "unit" / "conftest.py")
_lab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_lab)


@pytest.fixture
def make_lab() -> object:
    """The helpers of the unit tests of stages, around any bus."""
    return _lab.Lab
