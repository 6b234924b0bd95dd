"""The services by name: the stage that each one runs, and in which order they start and stop.

Stages are named, not imported, so that a machine that runs environments needs no torch.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.nearest import nearest
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["SERVICES", "ServiceSpec", "Stage", "find", "load_stage"]

Stage = Callable[[Service, RunConfig, str], Awaitable[None]]
"""Runs a stage: the service, the run's configuration, and the part it plays (a role, an environment, or empty)."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service. `stage`: `module:function` in `lachesis.pipeline`.

    `phase`: services of a lower one are ready before those of a higher one start, and stop after them. `extra`: what
    has to be installed for it. `part`: the part it plays where none is named; None: it has no parts.
    """

    name: str
    stage: str
    phase: int
    about: str
    extra: str | None = None
    part: str | None = None
    tinker: str | None = None
    """Its stage where the run trains at Tinker."""

    def of(self, config: RunConfig, part: str) -> ServiceSpec:
        """Return the service as this run's configuration wants it."""
        if self.tinker is None or not config.is_at_tinker(self.name, part):
            return self
        return dataclasses.replace(self, stage=self.tinker, extra="tinker")


SERVICES = {
    spec.name: spec
    for spec in (
        ServiceSpec(
            "governor",
            "governor.stage:run_governor",
            1,
            "grants leases, so that nothing is generated that cannot be used",
        ),
        ServiceSpec(
            "batcher", "batcher.stage:run_batcher", 1, "joins annotations, forms batches and writes the ledger"
        ),
        ServiceSpec(
            "normalizer", "normalizer.stage:run_normalizer", 1, "turns scores into normalized rewards and advantages"
        ),
        ServiceSpec(
            "curriculum", "curriculum.stage:run_curriculum", 1, "learns from outcomes which tasks to draw next"
        ),
        ServiceSpec(
            "health", "health.stage:run_health", 1, "checks the run by its events; quarantines and halts environments"
        ),
        ServiceSpec("scorer", "scorer.stage:run_scorer", 1, "rates rollouts with an ensemble of raters"),
        ServiceSpec("teacher", "teacher.stage:run_teacher", 1, "adds a second model's logprobs"),
        ServiceSpec(
            "inference",
            "inference.stage:run_inference",
            1,
            "serves a model (policy, teacher or eval)",
            "train",
            part="policy",
            tinker="trainer.tinker.serving:run_tinker_inference",
        ),
        ServiceSpec(
            "trainer",
            "trainer.stage:run_trainer",
            1,
            "trains on batches and publishes weights",
            "train",
            tinker="trainer.tinker.stage:run_tinker_trainer",
        ),
        ServiceSpec("evaluator", "evaluator.stage:run_evaluator", 2, "evaluates policy versions on held-out tasks"),
        # after the evaluator, which would miss the first policy if training began without it
        ServiceSpec(
            "gateway", "gateway.stage:run_gateway", 3, "publishes what environments elsewhere send over HTTP", "gateway"
        ),
        ServiceSpec("environment", "environment.stage:run_environments", 3, "generates rollouts of its tasks", part=""),
    )
}


def find(name: str) -> ServiceSpec:
    """Return a service by name. Raises `ConfigError` that names the nearest."""
    spec = SERVICES.get(name)
    if spec is None:
        raise ConfigError(f"there is no service {name!r}{nearest(name, SERVICES)}")
    return spec


def load_stage(spec: ServiceSpec) -> Stage:
    """Import a service's stage.

    Raises `StartupError`, which names the extra to install, when a package is missing.
    """
    module, _, function = spec.stage.partition(":")
    try:
        run = getattr(importlib.import_module(f"lachesis.pipeline.{module}"), function)
    except ModuleNotFoundError as error:
        if spec.extra is None or (error.name or "").startswith("lachesis"):
            raise
        raise StartupError(f"{spec.name} needs the package {error.name!r}: {install_command(spec.extra)}") from error

    async def stage(service: Service, config: RunConfig, part: str) -> None:
        await (run(service, config) if spec.part is None else run(service, config, part or spec.part))

    return stage
