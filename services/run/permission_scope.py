"""Reads from the configuration what a run's subjects and permissions are made of. Pure."""

from lachesis.pipeline.access import Scope
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.keys import INFERENCE_ROLES

__all__ = ["scope_of"]


def scope_of(config: RunConfig) -> Scope:
    """Return what the run's subjects are made of."""
    foreign = tuple(name for name, env in config.environments.items() if env.is_foreign)
    return Scope(
        run=config.run,
        revision=config.revision,
        trainer=config.training.name,
        environments=tuple(config.environments),
        foreign=foreign,
        trains_over_http=bool(foreign) and config.mode == "observe",
        teachers=tuple(role for role in config.inference if role not in INFERENCE_ROLES),
    )
