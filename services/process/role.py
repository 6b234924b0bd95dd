"""Says which process this is: its services, and the part, number and supervisor that it has.

In the log of a process that several services share, each line names the service that wrote it.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from lachesis.pipeline.access import identity_of
from lachesis.pipeline.config.shared_processes import check_shareable, joined_name, services_in
from lachesis.pipeline.extension import ServiceSpec
from lachesis.schemas.errors import ConfigError
from lachesis.services.registry import find

__all__ = ["ProcessRole", "log_to_stderr", "logged_as"]

_LOGGED_AS: ContextVar[str | None] = ContextVar("_LOGGED_AS", default=None)


@dataclass(frozen=True, slots=True)
class ProcessRole:
    """Which process this is: its services, the part it plays, its number among its replicas if it was given one, and
    whether a supervisor watches over it.

    Only a process of one service plays a part.
    """

    specs: tuple[ServiceSpec, ...]
    part: str = ""
    number: int | None = None
    supervised: bool = False

    @classmethod
    def of(cls, process: str, part: str = "", number: int | None = None, *, supervised: bool = False) -> Self:
        """Return the role of a process by its name: a service, or several joined by `+`.

        Raises `ConfigError` where there is no such service, or they cannot share a process.
        """
        names = services_in(process)
        if len(names) == 1:
            return cls((find(process),), part, number, supervised)
        check_shareable(names, process)
        if part:
            raise ConfigError(f"{process} {part}: services that share a process have no parts")
        return cls(tuple(map(find, names)), "", number, supervised)

    @property
    def services(self) -> tuple[str, ...]:
        """The services by their own names."""
        return tuple(spec.name for spec in self.specs)

    @property
    def name(self) -> str:
        return joined_name(map(self.speaker, self.specs))

    def speaker(self, spec: ServiceSpec) -> str:
        """Return the name under which one of the services sends heartbeats."""
        return f"{spec.name}-{self.part}" if self.part else spec.name

    def identity(self, spec: ServiceSpec) -> str:
        """Return whose key one of the services has, where the run has keys."""
        return identity_of(spec.name, self.part)


def log_to_stderr(process: str) -> None:
    """Log to standard error, each line with the name of the process, or with that of `logged_as`."""

    def name(record: logging.LogRecord) -> bool:
        record.service = _LOGGED_AS.get() or process
        return True

    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(name)
    line = "%(asctime)s %(levelname)s %(service)s %(message)s"
    logging.basicConfig(handlers=[handler], level=logging.INFO, format=line, force=True)


@contextmanager
def logged_as(service: str) -> Iterator[None]:
    """Log the lines of this task, and of those that it starts, under the name of a service."""
    before = _LOGGED_AS.set(service)
    try:
        yield
    finally:
        _LOGGED_AS.reset(before)
