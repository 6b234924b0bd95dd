"""With the gateway's own key, on a server that refuses all else, a trainer over HTTP gets and reports batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from integration.security.secured import Secured, auth_init

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import EnvironmentConfig
from lachesis.pipeline.errors import AccessError
from lachesis.pipeline.extensions.atropos.gateway.config import GatewayConfig
from lachesis.pipeline.extensions.atropos.gateway.settings import gateway_settings
from lachesis.pipeline.extensions.atropos.gateway.stage import run_gateway
from lachesis.pipeline.ledger.reader import newest_entry
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import keys, subjects
from lachesis.schemas.ledger import TrainReport

OBSERVED = 'run = "r"\nmode = "{mode}"\n[environments.far]\nkind = "gateway"\n'
STOCK = {
    "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "starting_step": 0,
    "checkpoint_dir": "c", "save_checkpoint_interval": 7, "num_steps": 20,
}  # fmt: skip


async def train(server: Secured, make_lab: Callable[[Any], Any], streams_config: object, folder: Path) -> None:
    """Ask the gateway for two batches that the batcher wrote, and wait until the first is reported."""
    config = run_config_type()(
        run="r",
        mode="observe",
        folder=str(folder),
        environments={"far": EnvironmentConfig(kind="gateway", longest_tokens=64)},
        batching=BatchingConfig(batch_size=8),
        gateway=GatewayConfig(port=0, needs_token=False),
    )
    async with (
        await server.bus("operator") as operator,
        await server.bus("batcher") as batcher,
        await server.bus("gateway") as own,
        open_service(own, "gateway", "r") as service,
        anyio.create_task_group() as tasks,
    ):
        await operator.ensure_streams(streams_config)
        lab, writer = make_lab(own), make_lab(batcher)
        writer.store = lab.store  # rollouts by the key of the gateway, the ledger by that of the batcher
        groups = [lab.group(n, env="far", samples=4, run="r") for n in range(4)]
        await writer.extend_ledger(groups[:2], groups[2:])
        tasks.start_soon(run_gateway, service, gateway_settings(config))
        with anyio.fail_after(60):
            while "gateway/port" not in service.vitals.metrics:  # noqa: ASYNC110 - an HTTP server begins to listen
                await anyio.sleep(0.01)
        url = f"http://127.0.0.1:{service.vitals.metrics['gateway/port']}"
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            assert (await http.post("/register", json=STOCK)).status_code == 200
            answers = [(await http.get("/batch")).json()["batch"] for _ in range(3)]
        assert [batch and len(batch) for batch in answers] == [2, None, 2]
        subject = subjects.state("r", "trainer", subjects.LIVE, "main")
        report, _, _ = await read_last_event(operator, subjects.LEDGER, subject, TrainReport, lambda _: True)
        assert report is not None
        assert report.next_batch == 1
        assert await operator.value(keys.POLICY) is not None
        tasks.cancel_scope.cancel()


@pytest.fixture
def make_server(tmp_path: Path) -> Callable[[str], Secured]:
    def make(mode: str) -> Secured:
        auth_init(tmp_path, config=OBSERVED.format(mode=mode))
        return Secured(tmp_path, "r", tls=False)

    return make


@pytest.mark.slow
async def test_the_gateways_key_suffices(
    make_server: Callable[[str], Secured], make_lab: Callable[[Any], Any], streams_config: object, tmp_path: Path
) -> None:
    async with make_server("observe") as server:
        await train(server, make_lab, streams_config, tmp_path)


@pytest.mark.slow
async def test_where_the_run_has_its_own_trainer_the_gateways_key_reads_no_ledger(
    make_server: Callable[[str], Secured], streams_config: object
) -> None:
    async with make_server("train") as server, await server.bus("operator") as operator:
        await operator.ensure_streams(streams_config)
        async with await server.bus("gateway") as bus:
            with pytest.raises(AccessError):
                await newest_entry(bus, "r", "main")
