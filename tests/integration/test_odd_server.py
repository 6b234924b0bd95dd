"""A real run whose policy server answers nonsense, or is not the run's: said, nothing stored, and it goes on."""

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from integration.harness import Run
from integration.odd_server import OddServer, open_odd_server
from integration.servers import Supervised

from lachesis.pipeline.notices.text import notice_line
from lachesis.services.run.notices_file import NOTICES_FILE, SavedNotices

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
async def odd_run(tmp_path: Path) -> AsyncIterator[tuple[OddServer, Run]]:
    own, odd = free_port(), free_port()
    sets = {"inference.policy.port": own, "inference.policy.advertise": f"http://127.0.0.1:{odd}"}
    run = Run(tmp_path, 1_000_000, Supervised(tmp_path), sets=sets)
    async with open_odd_server(f"http://127.0.0.1:{own}", odd) as server:
        with run:
            run.start()
            await run.wait_for_step(2)
            yield server, run


def notices(folder: Path) -> list[str]:
    saved = msgspec.json.decode((folder / NOTICES_FILE).read_bytes(), type=SavedNotices)
    return [notice_line(one) for one in saved.notices]


async def test_what_a_server_does_is_said_and_the_run_goes_on(odd_run: tuple[OddServer, Run]) -> None:
    server, run = odd_run
    for mode, words in {
        "html": "It begins '<html><body>502 Bad Gateway",
        "garbage ids": "none of the 101 the trainer knows",
        "version": "which this run's trainer has not published",
        "unknown model": "The model `policy` does not exist",
        "key refused": "this key is revoked",
        "hash": "has another tokenizer than the trainer: ffffffffffff",
    }.items():
        server.mode = mode
        with anyio.fail_after(120):
            while not any(words in line for line in notices(run.folder)):  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.1)
        server.mode = ""
        await run.wait_for_step(run.step() + 2)
        with anyio.fail_after(120):
            while any(words in line for line in notices(run.folder)):  # noqa: ASYNC110 - other processes
                await anyio.sleep(0.1)
