"""The services by name: the stage that each one runs, and in which order they start and stop.

Stages are named, not imported, so that a machine that runs environments needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import ServiceSpec, load_place, with_added
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.config import TORCH_BACKEND
from lachesis.schemas.errors import ConfigError

__all__ = ["CORE", "Stage", "find", "load_stage", "service_of", "services"]

Stage = Callable[[Service, RunConfig, str], Awaitable[None]]
"""Runs a stage: the service, the run's configuration, and the part it plays (a role, an environment, or empty)."""


_HERE = "lachesis.pipeline"

CORE = {
    spec.name: spec
    for spec in (
        ServiceSpec(
            "governor",
            f"{_HERE}.governor.stage:run_governor",
            1,
            "grants leases, so that nothing is generated that cannot be used",
        ),
        ServiceSpec(
            "batcher",
            f"{_HERE}.batcher.stage:run_batcher",
            1,
            "joins annotations, forms batches and writes the ledger",
        ),
        ServiceSpec(
            "normalizer",
            f"{_HERE}.normalizer.stage:run_normalizer",
            1,
            "turns scores into normalized rewards and advantages",
        ),
        ServiceSpec(
            "curriculum",
            f"{_HERE}.curriculum.stage:run_curriculum",
            1,
            "learns from outcomes which tasks to draw next",
        ),
        ServiceSpec(
            "health",
            f"{_HERE}.health.stage:run_health",
            1,
            "checks the run by its events; quarantines and halts environments",
        ),
        ServiceSpec("scorer", f"{_HERE}.scorer.stage:run_scorer", 1, "rates rollouts with an ensemble of raters"),
        ServiceSpec("teacher", f"{_HERE}.teacher.stage:run_teacher", 1, "adds a second model's logprobs"),
        ServiceSpec(
            "inference",
            f"{_HERE}.inference.stage:run_inference",
            1,
            "serves a model (policy, teacher or eval)",
            "train",
            part="policy",
        ),
        ServiceSpec(
            "trainer",
            f"{_HERE}.trainer.stage:run_trainer",
            1,
            "trains on batches and publishes weights",
            "train",
            backend=TORCH_BACKEND,
        ),
        ServiceSpec(
            "evaluator",
            f"{_HERE}.evaluator.stage:run_evaluator",
            2,
            "evaluates policy versions on held-out tasks",
        ),
        # after the evaluator, which would miss the first policy if training began without it
        ServiceSpec(
            "environment",
            f"{_HERE}.environment.stage:run_environments",
            3,
            "generates rollouts of its tasks",
            part="",
        ),
    )
}
"""The services of the pipeline itself."""


def services() -> dict[str, ServiceSpec]:
    """Return all services by name: the pipeline's own, then the extensions'."""
    return with_added("services", CORE)


def service_of(config: RunConfig, name: str, part: str) -> ServiceSpec:
    """Return a service as this run's configuration wants it.

    Raises `ConfigError` that names the nearest where there is none.
    """
    spec, elsewhere = find(name), config.trains_elsewhere(name, part)
    if elsewhere is None:
        return spec
    if name == "trainer":
        return dataclasses.replace(spec, backend=elsewhere.open, extra=elsewhere.extra)
    return dataclasses.replace(spec, stage=elsewhere.serving, extra=elsewhere.extra)


def find(name: str) -> ServiceSpec:
    """Return a service by name. Raises `ConfigError` that names the nearest."""
    spec = services().get(name)
    if spec is None:
        raise ConfigError(f"there is no service {name!r}{nearest(name, services())}")
    return spec


def load_stage(spec: ServiceSpec) -> Stage:
    """Import a service's stage.

    Raises `StartupError`, which names the extra to install, when a package is missing.
    """
    try:
        with uncollected_imports():
            run = load_place(spec.stage)
            if spec.backend is not None:
                load_place(spec.backend)
    except ModuleNotFoundError as error:
        if spec.extra is None or (error.name or "").startswith("lachesis"):
            raise
        raise StartupError(f"{spec.name} needs the package {error.name!r}: {install_command(spec.extra)}") from error

    from lachesis.services.stage_settings import SETTINGS  # numpy, which a list of services does not need

    core = CORE.get(spec.name)
    made = SETTINGS.get(spec.name) if core is not None and core.stage == spec.stage else None
    if spec.settings is not None:
        made = load_place(spec.settings)

    async def stage(service: Service, config: RunConfig, part: str) -> None:
        parts = () if spec.part is None else (part or spec.part,)
        await (run(service, config, *parts) if made is None else run(service, made(config, *parts)))

    return stage
