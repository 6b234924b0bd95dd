"""The trainer's log takes the health service's figures from its heartbeats, and those alone."""

from lachesis.pipeline.training.overheard import HealthFigures
from lachesis.schemas import subjects


async def test_the_newest_health_figures_are_taken(lab):
    figures = HealthFigures()
    async with lab.running(figures.listen, "trainer") as trainer:

        async def health(service):
            service.vitals.metrics = {"health/sums/truncated": 0.25, "service_load": 1.0}

            async def heard():
                await lab.bus.broadcast(subjects.heartbeat("r", "health", "bad"), b"\xc1")
                await service.heartbeat()
                return bool(figures.newest)

            await lab.until(heard)

        async with lab.running(health, "health"):
            pass
        trainer.kill()
    assert figures.newest == {"health/sums/truncated": 0.25}
