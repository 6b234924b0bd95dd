"""What a foreign environment changes in a run: the gateway runs, and nothing draws or generates its tasks."""

import pytest
from stages import run_curriculum

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes

FOREIGN = EnvironmentConfig(kind="gateway")
OWN = EnvironmentConfig(kind="reasoning_gym")


def test_the_gateway_runs_where_there_is_something_to_publish_for():
    names = [row.name for row in planned_processes(RunConfig(environments={"words": FOREIGN, "own": OWN}))]
    assert names.count("gateway") == 1
    assert "environment-own" in names
    assert "environment-words" not in names
    assert "gateway" not in [row.name for row in planned_processes(RunConfig(environments={"own": OWN}))]


def test_held_out_tasks_are_not_asked_for_elsewhere():
    with pytest.raises(ConfigError, match=r"evaluation\.words\.kind"):
        RunConfig(environments={"own": OWN}, evaluation={"words": FOREIGN})


async def test_a_curriculum_without_tasks_to_draw_is_ready_and_drains(lab):
    config = RunConfig(run="r", environments={"words": FOREIGN})

    async def main(service):
        await run_curriculum(service, config)

    async with lab.running(main, "curriculum") as service:
        await service.started.wait()
