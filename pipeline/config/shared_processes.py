"""Checks which services share a process. Pure.

A process that several services share is named by all of them, joined by `+`. Guarantees that none of them computes for
seconds at a time, or works on rollouts with code of a user's: either would hold up the others, or end them.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from lachesis.pipeline.common.closest_name import nearest
from lachesis.schemas.errors import ConfigError

__all__ = ["SHAREABLE", "check_shareable", "check_together", "joined_name", "services_in"]

SHAREABLE: Final = ("governor", "normalizer", "curriculum", "batcher", "health", "teacher")
_JOINED_BY: Final = "+"
_COMPUTES = "it computes for seconds at a time, while the others would stand still"
_RUNS_CODE = "it runs code of yours, which may hold up or end its process"
_REASONS: Final = {
    "trainer": _COMPUTES,
    "inference": _COMPUTES,
    "environment": _RUNS_CODE,
    "evaluator": _RUNS_CODE,
    "scorer": _RUNS_CODE,
}


def services_in(process: str) -> tuple[str, ...]:
    """Return the services that run in a process, by its name."""
    return tuple(process.split(_JOINED_BY))


def joined_name(services: Iterable[str]) -> str:
    """Return the name of the process that these services share."""
    return _JOINED_BY.join(services)


def check_together(together: Sequence[Sequence[str]], *, teachers: int) -> None:
    """Raise `ConfigError` unless `services.together` is one list of services for each shared process."""
    for names in together:
        check_shareable(names, "services.together")
    every = [name for names in together for name in names]
    if repeated := [name for name in every if every.count(name) > 1]:
        raise ConfigError(f"services.together names {repeated[0]} twice, and a service runs in one process")
    if "teacher" in every and teachers > 1:
        raise ConfigError(
            f"services.together names teacher, and services.teachers is {teachers}: replicas are processes of their "
            "own; set services.teachers = 1, or leave teacher out"
        )


def check_shareable(names: Sequence[str], place: str) -> None:
    """Raise `ConfigError` that begins with `place` if one of the services cannot share a process."""
    for name in names:
        if name not in SHAREABLE:
            why = _REASONS.get(name)
            unknown = f"{name!r} is none of the services that can share a process{nearest(name, SHAREABLE)}"
            found = f"{name} needs a process of its own, because {why}" if why else unknown
            raise ConfigError(f"{place}: {found} (those that can share one: {', '.join(SHAREABLE)})")
    if len(names) < 2:
        raise ConfigError(f"{place}: {list(names)} has to name two services or more, which then share a process")
