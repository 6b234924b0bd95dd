"""The services by name: where each one's `main` is, and in which order they start and stop.

Modules are named, not imported, so that a machine that runs environments needs no torch.
"""

import difflib
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.installation import install_command
from lachesis.pipeline.stage.service import Service
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["SERVICES", "Main", "ServiceSpec", "find", "load_main"]

Main = Callable[[Service, RunConfig, str], Awaitable[None]]
"""A service's entry: the service, the run's configuration, and the part it plays (a role, an environment, or empty)."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """`phase`: services of a lower one are ready before those of a higher one start, and stop after them."""

    name: str
    module: str
    phase: int
    about: str
    extra: str | None = None


SERVICES = {
    spec.name: spec
    for spec in (
        ServiceSpec("governor", "governor", 1, "grants leases, so that nothing is generated that cannot be used"),
        ServiceSpec("batcher", "batcher", 1, "joins annotations, forms batches and writes the ledger"),
        ServiceSpec("normalizer", "normalizer", 1, "turns scores into normalized rewards and advantages"),
        ServiceSpec("curriculum", "curriculum", 1, "learns from outcomes which tasks to draw next"),
        ServiceSpec("health", "health", 1, "judges the run by its events; quarantines and halts environments"),
        ServiceSpec("scorer", "scorer", 1, "rates rollouts with an ensemble of raters"),
        ServiceSpec("teacher", "teacher", 1, "adds a second model's logprobs"),
        ServiceSpec("inference", "inference", 1, "serves a model (policy, teacher or eval)", "train"),
        ServiceSpec("trainer", "trainer", 1, "trains on batches and publishes weights", "train"),
        ServiceSpec("evaluator", "evaluator", 2, "evaluates policy versions on held-out tasks"),
        # after the evaluator, which would miss the first policy if training began without it
        ServiceSpec("gateway", "gateway", 3, "publishes what environments elsewhere send over HTTP", "gateway"),
        ServiceSpec("environment", "environment", 3, "generates rollouts of its tasks"),
    )
}


def find(name: str) -> ServiceSpec:
    """Return a service by name. Raises `ConfigError` that names the nearest."""
    spec = SERVICES.get(name)
    if spec is None:
        close = difflib.get_close_matches(name, SERVICES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(SERVICES)}"
        raise ConfigError(f"there is no service {name!r}; {hint}")
    return spec


def load_main(spec: ServiceSpec) -> Main:
    """Import a service. Raises `StartupError` naming the extra to install when one of its packages is missing."""
    try:
        module = importlib.import_module(f"lachesis.services.{spec.module}")
    except ModuleNotFoundError as error:
        if spec.extra is None or (error.name or "").startswith("lachesis"):
            raise
        raise StartupError(f"{spec.name} needs the package {error.name!r}: {install_command(spec.extra)}") from error
    main: Main = module.main
    return main
