"""Refuses a second process of a service that may run only once, and names the first.

A starting process sends a request on the service's own health subject, before it answers there itself. A process that
died no longer answers from the moment its connection is gone, so nothing has to expire. If two start in the same
moment, both get no answer; then the fence of what they write decides.
"""

import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import anyio
import msgspec

from lachesis.pipeline.access import SINGLE_WRITERS
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, StartupError, UnservedError
from lachesis.schemas import subjects
from lachesis.services.registry import services as known_services

__all__ = ["WriterPlace", "refuse_writers_beside"]

log = logging.getLogger("lachesis")

_ASK_S = 2.0
_ASK_AGAIN_S = 0.2
_EXTRA_S = 2.0
"""How much longer than it may drain a predecessor is waited for."""


class WriterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process runs, and whether a supervisor started it."""

    host: str = ""
    pid: int = 0
    folder: str = ""
    supervised: bool = False

    @classmethod
    def current(cls, folder: Path, *, supervised: bool) -> Self:
        """Return that of this process, in the run's folder."""
        return cls(host=socket.gethostname(), pid=os.getpid(), folder=str(folder.resolve()), supervised=supervised)


class _WriterAnswer(WriterPlace, frozen=True, kw_only=True):
    state: str = ""
    revision: str = subjects.LIVE


async def refuse_writers_beside(
    bus: Bus, config: RunConfig, services: Iterable[str], *, replaces: WriterPlace | None = None
) -> None:
    """Return once none of `services` that is a single writer runs in another process.

    A service may be named with its part, as processes are: environment-words. Raises StartupError naming the other.

    One that drains is waited for. A supervisor `replaces` those of its predecessor in the same folder, which drain.
    """
    async with anyio.create_task_group() as tasks:
        for service in services:
            spec = known_services().get(service)
            if service in SINGLE_WRITERS or (spec is not None and spec.is_single):
                tasks.start_soon(_refuse_beside, bus, config, service, replaces)


async def _refuse_beside(bus: Bus, config: RunConfig, service: str, replaces: WriterPlace | None) -> None:
    until_s = anyio.current_time() + config.drain_s(service) + _EXTRA_S
    while (other := await _request_place(bus, config.run, service)) is not None:
        if other.revision != config.revision or (replaces is not None and _is_replaced(other, replaces)):
            return
        if other.state != "draining" or anyio.current_time() > until_s:
            place = f"pid {other.pid} on {other.host}, in {other.folder}"
            mend = "a supervisor started it: stop that" if other.supervised else "stop it first"
            raise StartupError(
                f"another {service} of run {config.run} runs already, and a run has one: {place}; {mend}, or give this "
                "run another name (--run)"
            )
        await anyio.sleep(_ASK_AGAIN_S)


def _is_replaced(other: WriterPlace, place: WriterPlace) -> bool:
    return other.supervised and (other.host, other.folder) == (place.host, place.folder)


async def _request_place(bus: Bus, run: str, service: str) -> _WriterAnswer | None:
    """Return what the service that runs says of itself; None if none does, or it cannot be heard."""
    try:
        return msgspec.json.decode(
            await bus.request(subjects.health(run, service), b"", timeout_s=_ASK_S), type=_WriterAnswer
        )
    except UnservedError:
        return None
    except (InfrastructureError, msgspec.DecodeError) as error:
        log.warning("a %s of this run seems to be there and does not answer (%s): if it still runs, one of the two "
            "ends",
                    service, error)  # fmt: skip
        return None
