"""Reads where the environments of a run stand by its health checks."""

import msgspec

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.drawn_environments import reason_no_curriculum
from lachesis.schemas import subjects
from lachesis.schemas.alerts import Alert, AlertEvent, EnvironmentStanding
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.services.observe.find import first_seq_of_last
from lachesis.services.stage_settings import curriculum_settings

__all__ = ["EnvHealth", "checked_environments", "read_alert", "read_health"]

_RECENT_ALERTS = 32
"""Alert events looked at: enough to find the newest result of every check."""


class EnvHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: its standing, the groups checked since its start or resumption, and each check's result."""

    env: str
    standing: EnvironmentStanding
    groups: int
    results: list[Alert]
    no_curriculum: str | None = None
    """Why the run does not draw its tasks; None: it does, or nothing is known of the environment's settings."""

    @property
    def stopped(self) -> bool:
        """Whether it is quarantined or halted."""
        return self.standing.halted or self.standing.quarantined_from is not None

    @property
    def is_healthy(self) -> bool:
        """Whether it was checked, and goes on."""
        return self.groups > 0 and not self.stopped


async def checked_environments(bus: Bus, config: RunConfig) -> list[str]:
    """Return the environments configured, else those that were checked.

    Raises `ConfigError` where there is none.
    """
    found = dict.fromkeys(config.environments)
    if not found:
        subject = subjects.event("alert", config.run, config.revision)
        start = await first_seq_of_last(bus, subjects.EVENTS, [subject], _RECENT_ALERTS)
        async with bus.read(subjects.EVENTS, [subject], start=start, headers_only=True, follow=False) as messages:
            async for message in messages:
                found[message.subject.rsplit(".", 1)[-1]] = None
    if not found:
        raise ConfigError(f"no environment of run {config.run} was checked yet, and none is configured; add --config")
    return list(found)


async def read_health(bus: Bus, config: RunConfig, env: str) -> EnvHealth:
    """Return where `env` stands by its newest alert events."""
    subject = subjects.event("alert", config.run, config.revision, env)
    results: dict[str, Alert] = {}
    standing, groups = EnvironmentStanding(), 0
    start = await first_seq_of_last(bus, subjects.EVENTS, [subject], _RECENT_ALERTS)
    async with bus.read(subjects.EVENTS, [subject], start=start, follow=False) as messages:
        async for message in messages:
            event = read_alert(message)
            if event is None:
                continue
            if event.source == "resume":
                results.clear()
            results.update({result.check: result for result in event.results})
            standing, groups = event.standing, event.groups
    return EnvHealth(
        env=env,
        standing=standing,
        groups=groups,
        results=list(results.values()),
        no_curriculum=reason_no_curriculum(curriculum_settings(config), env),
    )


def read_alert(message: StoredMessage) -> AlertEvent | None:
    """Return the alert event that a message holds, None if it holds none."""
    try:
        return decode(AlertEvent, message.data)
    except SchemaError:
        return None  # it is no alert of this build; `lachesis tail alert` shows what it is
