"""The scope of a run's curriculum: the environments that it draws tasks for, and why no others. Pure."""

from collections.abc import Mapping

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig

__all__ = ["curriculum_environments", "describe_curriculum", "reason_no_curriculum"]


def curriculum_environments(config: RunConfig) -> Mapping[str, EnvironmentConfig]:
    """Return the environments whose tasks the run draws by its curriculum, by name."""
    return {env: one for env, one in config.environments.items() if reason_no_curriculum(config, env) is None}


def reason_no_curriculum(config: RunConfig, env: str) -> str | None:
    """Return why the environment has no curriculum.

    None if it has one, or if the configuration does not know it.
    """
    settings = config.environments.get(env)
    if settings is None or not settings.is_foreign:
        return None
    return (
        "its clients draw its tasks themselves, behind the gateway; its scores count for statistics and health checks, "
        "and steer no draw"
    )


def describe_curriculum(config: RunConfig) -> list[str]:
    """Describe in words which strategy draws each environment's tasks, and which have no curriculum."""
    covered = ", ".join(curriculum_environments(config))
    lines = [f"curriculum {config.curriculum.strategy}: {covered}"] if covered else []
    reasons = {env: reason_no_curriculum(config, env) for env in config.environments}
    return [*lines, *(f"no curriculum for {env}: {reason}" for env, reason in reasons.items() if reason is not None)]
