"""Alerts: what the health checks found in an environment, and what follows for its groups.

One writer (the health service) commits an `AlertEvent` for each window and each evaluation it checked. The newest one
of an environment is its status: if it says halted, the governor grants no lease, and if it says quarantined, the
batcher diverts groups. A `ResumeRequest` makes that writer lift both.
"""

import math
from typing import Literal

import msgspec

from lachesis.schemas.annotations import Commit
from lachesis.schemas.codec import Event
from lachesis.schemas.control import StopKind
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Count, Finite, Seq

__all__ = ["Alert", "AlertEvent", "EnvironmentStanding", "ResumeRequest", "RolloutRange", "SentAlerts", "Severity"]

Severity = Literal["idle", "ok", "inform", "warn", "quarantine", "halt"]
"""From `inform` on it is an alert. idle: the check does not apply, or has nothing to judge by; that is not healthy."""


class Alert(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one check says of one window. `value` beyond `threshold` is what it warns of; None: there is no value.

    `windows` counts the windows in a row in which it warned or worse; `examples` are group ids, which are trace ids.
    """

    check: str
    severity: Severity
    value: Finite | None = None
    threshold: Finite | None = None
    reason: str = ""
    windows: Count = 0
    examples: list[str] = []


class RolloutRange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rollouts from sequence `first` of ROLLOUTS up to `last`, both among them; `cause` names the check."""

    first: Seq
    last: Seq
    cause: str | None = None


class EnvironmentStanding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What follows from the alerts so far. Rollouts from sequence `quarantined_from` of ROLLOUTS on are not trained.

    `cause` names the check, `since` the window that brought it about. `diverted` are the newest quarantines that were
    lifted, oldest first: services that learn of them only now do not train their rollouts either.
    """

    quarantined_from: Seq | None = None
    halted: bool = False
    cause: str | None = None
    since: Count | None = None
    diverted: list[RolloutRange] = []

    @property
    def stops(self) -> list[StopKind]:
        """How the environment is kept from training; [] if it is not."""
        found: list[StopKind] = ["halted"] if self.halted else []
        return [*found, "quarantined"] if self.quarantined_from is not None else found

    def untrainable_reason(self, seq: int) -> str | None:
        """Return why the rollout at sequence `seq` is not trained, None if it may be."""
        if self.quarantined_from is not None and seq >= self.quarantined_from:
            return f"the environment is quarantined by the health check {self.cause}"
        for span in self.diverted:
            if span.first <= seq <= span.last:
                return (
                    f"the environment was quarantined by the health check {span.cause} from {span.first} to {span.last}"
                )
        return None


class AlertEvent(Event, frozen=True, kw_only=True):
    """A commit of the health service: what every check that judges `source` found in a window of it.

    `groups` counts those checked since the start or a resumption; with `source` resume it lifts the standing. The
    result of a held-out evaluation comes by itself, with `source` groups, amid a window of them.
    """

    run: str
    env: str
    revision: str
    commit: Commit
    window: Count
    groups: Count
    source: Literal["groups", "batches", "resume"]
    results: list[Alert]
    standing: EnvironmentStanding

    @property
    def alerts(self) -> list[Alert]:
        """The results that are more than ok."""
        return [result for result in self.results if result.severity not in {"idle", "ok"}]

    def check(self) -> None:
        for result in self.results:
            if any(value is not None and not math.isfinite(value) for value in (result.value, result.threshold)):
                raise SchemaError(f"{result.check}: a value is NaN or infinite; a missing one is None")


class ResumeRequest(Event, frozen=True, kw_only=True):
    """Asks that an environment go on, by the key `resume.<env>`. The checks start over with the rollouts
    after sequence `after` of ROLLOUTS; what was stored before stays diverted.
    """

    run: str
    env: str
    after: Count
    asked_ns: Count


class SentAlerts(Event, frozen=True, kw_only=True):
    """How far the alerts of a run were sent to its webhook: up to the event at sequence `seq` of EVENTS.

    `firing` holds by environment and check the severity that was sent last, if it was an alert; `standings` by
    environment how it was kept from training then ("" if it was not).
    """

    run: str
    revision: str
    seq: Count
    firing: dict[str, dict[str, Severity]] = {}
    standings: dict[str, str] = {}
