"""Determines the environments for which a run's curriculum draws tasks, and why no others. Pure."""

from collections.abc import Mapping

from lachesis.pipeline.curriculum.settings import CurriculumEnv, CurriculumSettings

__all__ = ["curriculum_environments", "describe_curriculum", "reason_no_curriculum"]


def curriculum_environments(settings: CurriculumSettings) -> Mapping[str, CurriculumEnv]:
    """Return the environments with tasks that the curriculum learns about, by name."""
    return {env: one for env, one in settings.environments.items() if reason_no_curriculum(settings, env) is None}


def reason_no_curriculum(settings: CurriculumSettings, env: str) -> str | None:
    """Return why the environment has no curriculum.

    None if it has one, or if the configuration does not know it.
    """
    found = settings.environments.get(env)
    missing = settings.config.missing_of_pool(is_foreign=found.is_foreign) if found else None
    if missing is None:
        return None
    return (
        f"its clients draw its tasks themselves, and curriculum.strategy "
        f"{settings.config.strategy!r} needs {missing} of all tasks from the start; "
        "with irt, gain_per_token or pools they draw by weights (GET /curriculum). Its scores count for statistics and "
        "health checks"
    )


def describe_curriculum(settings: CurriculumSettings) -> list[str]:
    """Describe in words which strategy draws each environment's tasks, and which have no curriculum."""
    strategy, covered = settings.config.strategy, curriculum_environments(settings)
    own = ", ".join(env for env, one in covered.items() if not one.is_foreign)
    lines = [f"curriculum {strategy}: {own}"] if own else []
    lines += [
        f"curriculum {strategy} for {env}: of the items that its clients name; they draw by GET /curriculum"
        for env, one in covered.items()
        if one.is_foreign
    ]
    reasons = {env: reason_no_curriculum(settings, env) for env in settings.environments}
    return [*lines, *(f"no curriculum for {env}: {reason}" for env, reason in reasons.items() if reason is not None)]
