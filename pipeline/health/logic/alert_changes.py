"""Finds which alerts begin, change or end with an alert event, for receivers of changes alone."""

from typing import Literal

import msgspec

from lachesis.schemas.alerts import Alert, AlertEvent, SentAlerts, Severity

__all__ = ["AlertChange", "AlertNotification", "next_notification"]

_RANKS: dict[Severity, int] = {"idle": 0, "ok": 0, "inform": 1, "warn": 2, "quarantine": 3, "halt": 4}
_TRAINED = "trained"


class AlertChange(msgspec.Struct, frozen=True, kw_only=True):
    """A check whose severity is another than was sent last; ok where it is no alert, or below what is sent."""

    check: str
    severity: Severity
    before: Severity
    reason: str = ""
    value: float | None = None
    threshold: float | None = None
    examples: list[str] = []


class AlertNotification(msgspec.Struct, frozen=True, kw_only=True):
    """The post for an alert event. `seq` is its sequence in EVENTS; two with the same one are the same.

    `standing`: "trained", or how the environment is kept from that. `text` says all of it for people.
    """

    run: str
    revision: str
    environment: str
    seq: int
    window: int
    groups: int
    standing: str
    changes: list[AlertChange]
    text: str


def next_notification(
    sent: SentAlerts, event: AlertEvent, seq: int, lowest: Literal["inform", "warn", "quarantine", "halt"]
) -> tuple[AlertNotification | None, SentAlerts]:
    """Return the post for the event at `seq`, and the sent state after it.

    None: nothing changed, so nothing is posted.
    """
    firing = dict(sent.firing.get(event.env, {}))
    found = list(event.results)
    if event.source == "resume":  # the checks start over
        found = [Alert(check=check, severity="ok", reason="resumed") for check in sorted(firing)]
    changes = []
    for result in found:
        before = firing.pop(result.check, "ok")
        if result.severity == "idle":  # nothing to judge by: what was sent last still holds
            now: Severity = before
        else:
            now = result.severity if _RANKS[result.severity] >= _RANKS[lowest] else "ok"
        if now != "ok":
            firing[result.check] = now
        if now != before:
            changes.append(_change(result, now, before))
    standing = " and ".join(event.standing.stops)
    after = sent.replace(
        seq=seq, firing=sent.firing | {event.env: firing}, standings=sent.standings | {event.env: standing}
    )
    if not changes and standing == sent.standings.get(event.env, ""):
        return None, after
    return (
        AlertNotification(
            run=event.run,
            revision=event.revision,
            environment=event.env,
            seq=seq,
            window=event.window,
            groups=event.groups,
            standing=standing or _TRAINED,
            changes=changes,
            text=_text(event, changes, standing),
        ),
        after,
    )


def _change(result: Alert, now: Severity, before: Severity) -> AlertChange:
    return AlertChange(
        check=result.check,
        severity=now,
        before=before,
        reason=result.reason,
        value=result.value,
        threshold=result.threshold,
        examples=result.examples,
    )


def _text(event: AlertEvent, changes: list[AlertChange], standing: str) -> str:
    way_on = f"; `lachesis resume {event.env} --run {event.run}` lets it go on" if standing else ""
    lines = [f"run {event.run}, environment {event.env}: {standing or _TRAINED}{way_on}"]
    for change in changes:
        was = f" (was {change.before})" if change.before != "ok" else ""
        lines.append(f"{change.severity}: {change.check}{was}{f': {change.reason}' if change.reason else ''}")
    return "\n".join(lines)
