"""Runs a service's stage with the settings that the configuration of a run gives it, as `lachesis run` does."""

from collections.abc import Awaitable, Callable
from typing import Any

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.runtime.service import Service
from lachesis.services import registry
from lachesis.services.stage_settings import environment_settings


def stage_of(name: str) -> Callable[[Service, RunConfig], Awaitable[None]]:
    """Return what runs the stage of a service that has no parts."""

    async def run(service: Service, config: RunConfig) -> None:
        await registry.load_stage(registry.find(name))(service, config, "")

    return run


run_governor = stage_of("governor")
run_batcher = stage_of("batcher")
run_normalizer = stage_of("normalizer")
run_scorer = stage_of("scorer")
run_curriculum = stage_of("curriculum")
run_evaluator = stage_of("evaluator")


async def run_inference(service: Service, config: RunConfig, role: str) -> None:
    await registry.load_stage(registry.find("inference"))(service, config, role)


async def run_environment(service: Service, config: RunConfig, name: str, **given: Any) -> None:
    """Run one environment, or a `single` group of it."""
    from lachesis.pipeline.environment import stage

    await stage.run_environment(service, environment_settings(config, name), name, **given)


async def run_trainer(service: Service, config: RunConfig, offline: Any = None) -> None:
    from lachesis.pipeline.trainer import stage  # torch

    await stage.run_trainer(service, trainer_settings(config), offline)
