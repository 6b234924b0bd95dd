"""Hands changes of health alerts to the trackers: in order, each at least once, also after kills.

A file in the run's folder holds how far it has come. A run that gets a tracker only later does not send earlier alerts.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import HistoryLostError
from lachesis.pipeline.health.logic.alert_changes import AlertNotification, next_notification
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.tracking import Tracking
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent, SentAlerts
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError

__all__ = ["TRACKED_ALERTS_FILE", "track_alerts"]

log = logging.getLogger("lachesis")

TRACKED_ALERTS_FILE = "tracked_alerts.msgpack"
Verdict = Literal["inform", "warn", "quarantine", "halt"]


async def track_alerts(service: Service, folder: Path, lowest: Verdict, tracking: Tracking) -> None:
    """Send changes of alerts, from the verdict `lowest` on, until cancelled. `folder`: the run's."""
    path = folder / TRACKED_ALERTS_FILE
    sent = _read(path)
    if sent is None:
        sent = SentAlerts(run=service.run, revision=service.revision, seq=0)
        sent = await _follow(service, lowest, None, path, sent)
    while True:
        try:
            sent = await _follow(service, lowest, tracking, path, sent)
        except HistoryLostError:  # the broker's store was rolled back: what it has now is newer
            sent = sent.replace(seq=0)


async def _follow(
    service: Service, lowest: Verdict, tracking: Tracking | None, path: Path, sent: SentAlerts
) -> SentAlerts:
    """Fold alerts into what was sent and return it; with `tracking` send them too, and go on for ever."""
    subject = subjects.event("alert", service.run, service.revision)
    follow = tracking is not None
    async with service.bus.read(subjects.EVENTS, [subject], start=sent.seq + 1, follow=follow) as messages:
        async for message in messages:
            try:
                event = decode(AlertEvent, message.data)
            except SchemaError as error:
                log.warning("an alert at sequence %d cannot be read, and is not tracked: %s", message.seq, error)
                continue
            notification, sent = next_notification(sent, event, message.seq, lowest)
            if tracking is not None and notification is not None:
                await _send(tracking, notification)
                await _write(path, sent)
    await _write(path, sent)
    return sent


async def _send(tracking: Tracking, notification: AlertNotification) -> None:
    log.info("an alert goes to the trackers: %s", notification.text.splitlines()[0])
    await tracking.log_alert(notification)


def _read(path: Path) -> SentAlerts | None:
    """Return what was sent; None: nothing yet, or the file cannot be read, and then nothing old is sent again."""
    try:
        return decode(SentAlerts, read_small_file(path))
    except FileNotFoundError:
        return None
    except (SchemaError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read, so alerts are tracked from now on only: %s", path, error)
        return None


async def _write(path: Path, sent: SentAlerts) -> None:
    data = encode(sent)
    await write_when_room(path, partial(replace_file, path, data), needed_bytes=len(data))
