"""A producer's leases against the real governor."""

import anyio
from stages import run_governor

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.governor.config import FlowConfig


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
        leases = ProducerLeases(service, "p", "sums")
        tasks.start_soon(leases.renew)
        with anyio.fail_after(10):
            assert await leases.acquire(8, 100) is not None
        await anyio.sleep(3 * lease_s)  # generating
        figures = governor.vitals.metrics
        assert (figures["flow/leased"], figures["flow/expired"]) == (8, 0)
        tasks.cancel_scope.cancel()


async def test_the_next_governor_takes_over_what_a_producer_holds(lab):
    config = RunConfig(
        run="r",
        environments={"sums": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=0),
        flow=FlowConfig(lease_s=2.0),
    )

    def governor():
        return lab.running(lambda service: run_governor(service, config), "governor")

    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        leases = ProducerLeases(service, "p", "sums")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.renew)
            async with governor() as first:
                assert await leases.acquire(3, 100) is not None
                first.kill()
            async with governor() as second:
                await lab.until(lambda: _holds(second, 3))
                assert await leases.acquire(5, 100) is not None  # granted once no other lease can be about
                assert (second.vitals.metrics["flow/expired"], second.vitals.metrics["flow/late"]) == (0, 0)
            tasks.cancel_scope.cancel()


async def _holds(governor, sequences):
    return governor.vitals.metrics.get("flow/leased") == sequences
