"""What is posted of alert events: changes alone, and each of them."""

import msgspec

from lachesis.pipeline.health.logic.alert_changes import AlertNotification, next_notification
from lachesis.schemas.alerts import Alert, AlertEvent, EnvironmentStanding, SentAlerts, Severity
from lachesis.schemas.annotations import Commit


def event(results: dict[str, Severity], standing: EnvironmentStanding | None = None, **changes: object) -> AlertEvent:
    made = AlertEvent(
        run="r", env="sums", revision="live", commit=Commit(term="t", index=0, cursors={}, delta=b"", crc32=0),
        window=3,
        groups=64, source="groups", standing=standing or EnvironmentStanding(),
        results=[Alert(check=check, severity=severity, reason="why") for check, severity in results.items()],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


class Told:
    """The notifications of a series of events."""

    def __init__(self) -> None:
        self.sent = SentAlerts(run="r", revision="live", seq=0)
        self.seq = 0

    def after(self, found: AlertEvent, lowest: Severity = "warn") -> AlertNotification | None:
        self.seq += 1
        notification, self.sent = next_notification(self.sent, found, self.seq, lowest)  # type: ignore[arg-type]
        assert self.sent.seq == self.seq
        return notification


def changes(notification: AlertNotification | None) -> list[tuple[str, str, str]]:
    return [(c.check, c.before, c.severity) for c in notification.changes] if notification else []


def test_a_check_is_told_of_when_it_begins_grows_and_ends() -> None:
    told = Told()
    assert told.after(event({"collapse": "ok", "entropy": "idle"})) is None
    assert changes(told.after(event({"collapse": "warn", "entropy": "ok"}))) == [("collapse", "ok", "warn")]
    assert told.after(event({"collapse": "warn"})) is None, "it goes on"
    assert told.after(event({"collapse": "idle"})) is None, "nothing to judge by ends nothing"
    assert told.after(event({"held_out": "ok"})) is None, "an evaluation says nothing of the other checks"
    assert changes(told.after(event({"collapse": "quarantine"}))) == [("collapse", "warn", "quarantine")]
    assert changes(told.after(event({"collapse": "ok"}))) == [("collapse", "quarantine", "ok")]
    assert told.sent.firing == {"sums": {}}


def test_less_than_the_least_severity_counts_as_ok() -> None:
    told = Told()
    assert told.after(event({"collapse": "inform"})) is None
    assert changes(told.after(event({"collapse": "halt"}), "halt")) == [("collapse", "ok", "halt")]
    assert changes(told.after(event({"collapse": "warn"}), "halt")) == [("collapse", "halt", "ok")]


def test_environments_do_not_hide_each_other() -> None:
    told = Told()
    for env in ("sums", "words"):
        notification = told.after(event({"collapse": "warn"}, env=env))
        assert notification is not None
        assert notification.environment == env


def test_a_stop_is_told_and_so_is_that_it_goes_on() -> None:
    told = Told()
    halted = EnvironmentStanding(halted=True, quarantined_from=9, cause="collapse")
    notification = told.after(event({"collapse": "halt"}, halted))
    assert notification is not None
    assert notification.standing == "halted and quarantined"
    assert notification.text == (
        "run r, environment sums: halted and quarantined; `lachesis resume sums --run r` lets it go on\n"
        "halt: collapse: why"
    )
    assert told.after(event({"collapse": "halt"}, halted)) is None
    notification = told.after(event({}, source="resume"))
    assert notification is not None
    assert (notification.standing, changes(notification)) == ("trained", [("collapse", "halt", "ok")])
    assert told.after(event({"collapse": "ok"})) is None
