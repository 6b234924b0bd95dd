"""Determines the environments for which a run's curriculum draws tasks, and why no others. Pure."""

from collections.abc import Mapping

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.config import EnvironmentConfig

__all__ = ["curriculum_environments", "describe_curriculum", "reason_no_curriculum"]


def curriculum_environments(config: RunConfig) -> Mapping[str, EnvironmentConfig]:
    """Return the environments with tasks that the curriculum learns about, by name."""
    return {env: one for env, one in config.environments.items() if reason_no_curriculum(config, env) is None}


def reason_no_curriculum(config: RunConfig, env: str) -> str | None:
    """Return why the environment has no curriculum.

    None if it has one, or if the configuration does not know it.
    """
    settings = config.environments.get(env)
    missing = config.curriculum.missing_of_pool(is_foreign=settings.is_foreign) if settings else None
    if missing is None:
        return None
    return (
        f"its clients draw its tasks themselves, behind the gateway, and curriculum.strategy "
        f"{config.curriculum.strategy!r} needs {missing} of all tasks from the start; "
        "with irt or pools they draw by weights (GET /curriculum). Its scores count for statistics and health checks"
    )


def describe_curriculum(config: RunConfig) -> list[str]:
    """Describe in words which strategy draws each environment's tasks, and which have no curriculum."""
    strategy, covered = config.curriculum.strategy, curriculum_environments(config)
    own = ", ".join(env for env, settings in covered.items() if not settings.is_foreign)
    lines = [f"curriculum {strategy}: {own}"] if own else []
    lines += [
        f"curriculum {strategy} for {env}: of the items that its clients name; they draw by GET /curriculum"
        for env, settings in covered.items()
        if settings.is_foreign
    ]
    reasons = {env: reason_no_curriculum(config, env) for env in config.environments}
    return [*lines, *(f"no curriculum for {env}: {reason}" for env, reason in reasons.items() if reason is not None)]
