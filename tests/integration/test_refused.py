"""A real run whose server refuses its credentials for a while: said with the cause, and then it goes on."""

import os
import signal
from pathlib import Path

import pytest
from integration.harness import Run, until
from integration.servers import Standalone
from integration.standstill import notices_of

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.notices.text import notice_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _let_in(server: EmbeddedServer, token: str) -> None:
    """Let the server take this token alone."""
    file = server.store / "nats-server.conf"
    kept = [line for line in file.read_text().splitlines() if not line.startswith("authorization")]
    file.write_text("\n".join([*kept, f'authorization {{ token: "{token}" }}', ""]))
    os.kill(server.pid, signal.SIGHUP)


def _says(run: Run, *words: str) -> bool:
    return any(all(word in f"{one.source}: {notice_line(one)}" for word in words) for one in notices_of(run))


async def test_refused_credentials_are_said_and_waited_for(tmp_path: Path) -> None:
    async with Standalone.run(tmp_path) as standing:
        with Run(tmp_path, 1_000_000, standing) as run:
            run.start()
            await run.wait_for_step(2)
            _let_in(standing.server, "another")
            await until(lambda: _says(run, "nats-server refuses the run's credentials", "credentials of"), 60)
            await until(lambda: _says(run, "scorer", "credentials are refused"), 60)
            stopped = run.step()
            _let_in(standing.server, standing.server.token)
            await run.wait_for_step(stopped + 3)
            await until(lambda: not _says(run, "credentials"), 60)
            assert run.process is not None
            assert run.process.poll() is None
