"""A producer's leases against the real governor."""

import anyio

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environments.leases import Leases
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.pipeline.flow.stage import run_governor


async def test_a_short_lease_is_held_for_as_long_as_its_group_takes(lab):
    lease_s = 1.0
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=lease_s),
    )
    async with (
        lab.running(lambda service: run_governor(service, config), "governor") as governor,
        lab.running(lambda service: service.draining.wait(), "environment") as service,
        anyio.create_task_group() as tasks,
    ):
        leases = Leases(service, "p", "sums")
        tasks.start_soon(leases.renew)
        with anyio.fail_after(10):
            assert await leases.acquire(8, 100) is not None
        await anyio.sleep(3 * lease_s)  # generating
        figures = governor.vitals.metrics
        assert (figures["flow/leased"], figures["flow/expired"]) == (8, 0)
        tasks.cancel_scope.cancel()
