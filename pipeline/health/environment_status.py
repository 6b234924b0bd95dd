"""Reads each environment's status, for the services that must obey it.

The status is in the newest alert event of each, read at start and followed.

Guarantees that an older event never replaces a newer status: readers may read history again.
"""

from collections.abc import Iterable

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent, EnvironmentStanding
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import DataError, VersionError

__all__ = ["EnvironmentStatuses", "halted_reason"]


class EnvironmentStatuses:
    """The newest standing by environment; one without alerts yet has none."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[int, EnvironmentStanding]] = {}

    @property
    def last_seq(self) -> int:
        """The last sequence of EVENTS that held a standing."""
        return max((seq for seq, _ in self._newest.values()), default=0)

    async def read(self, bus: Bus, run: str, revision: str, environments: Iterable[str]) -> None:
        """Read what is stored now. Raises `InfrastructureError`."""
        for env in environments:
            subject = subjects.event("alert", run, revision, env)
            event, seq, _ = await read_last_event(bus, subjects.EVENTS, subject, AlertEvent, lambda _: True)
            if event is not None:
                self._newest[env] = (seq, event.standing)

    async def apply_alert(self, bus: Bus, message: StoredMessage) -> str | None:
        """Take in an alert event, and return its environment if it is the newest of it.

        One that cannot be read changes nothing; raises `VersionError` for one that a newer health service wrote.
        """
        env = message.subject.rsplit(".", 1)[-1]
        if message.seq <= self._newest.get(env, (0, None))[0]:
            return None
        try:
            event = decode(AlertEvent, message.data)
        except DataError as error:
            if isinstance(error, VersionError):  # it may halt what goes on here: wait for the upgrade
                await confirm_newer(bus, message, error)
            return None
        self._newest[env] = (message.seq, event.standing)
        return env

    def of(self, env: str) -> EnvironmentStanding:
        """Return where the environment stands."""
        return self._newest.get(env, (0, EnvironmentStanding()))[1]

    @property
    def environments(self) -> list[str]:
        """The environments that have one."""
        return list(self._newest)


def halted_reason(env: str, standing: EnvironmentStanding) -> str | None:
    """Return why nothing is dispatched to `env`, and how to go on; None if it is."""
    if not standing.halted:
        return None
    return f"{env} is halted by the health check {standing.cause}; see `lachesis health`, then `lachesis resume {env}`"
