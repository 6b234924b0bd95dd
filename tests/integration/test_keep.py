"""The demo's supervisor, killed: the next one's server is where the last one's was, so that its clients come back."""

import os
import signal
from pathlib import Path

import anyio
import pytest
from integration.harness import Run
from integration.servers import Supervised

from lachesis.pipeline.bus.embedded import Endpoint, read_endpoint
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.errors import StartupError
from lachesis.services.run.connect import NATS_FOLDER
from lachesis.services.supervisor.supervisor_keeper import keep_supervisor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def another_endpoint(store: Path, than: Endpoint | None = None) -> Endpoint:
    """Wait until a server that is not `than` runs on `store`."""
    while True:
        try:
            found = read_endpoint(store)
        except StartupError:
            found = than
        if found is not None and (than is None or found.pid != than.pid):
            return found
        await anyio.sleep(0.05)


async def test_the_next_supervisor_has_its_server_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "the run"
    folder.mkdir()
    run = Run(folder, 1000, Supervised(folder))
    monkeypatch.setenv("PYTHONPATH", run.environ["PYTHONPATH"])
    places = f'run = "kept"\nfolder = "{folder}"\nmodel = "{folder / "model"}"\n'
    run.config.write_text(places + run.config.read_text())
    config = load(run_config_type(), file=run.config, environ={}, sets=[]).config
    supervisors: list[int] = []

    async def beside(pid: int) -> None:
        supervisors.append(pid)

    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_supervisor, config, run.config, beside)
            before = await another_endpoint(folder / NATS_FOLDER)
            os.kill(supervisors[-1], signal.SIGKILL)
            after = await another_endpoint(folder / NATS_FOLDER, than=before)
            tasks.cancel_scope.cancel()
    assert (after.url, after.token) == (before.url, before.token)
    assert len(supervisors) == 2
