"""Alerts reach the trackers in order, each at least once, also when the trainer is killed in between."""

import anyio
import anyio.lowlevel
import pytest
from unit.health.test_webhook import publish
from unit.trainer.recorder import Recorder

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.trainer.tracked_alerts import TRACKED_ALERTS_FILE, track_alerts
from lachesis.pipeline.trainer.tracking import open_tracking
from lachesis.schemas.alerts import SentAlerts
from lachesis.schemas.codec import decode


@pytest.fixture
def config(tmp_path):
    return RunConfig(run="r", folder=str(tmp_path), health=HealthConfig(webhook_from="warn"))


def sent_up_to(config, seq):
    async def condition():
        file = config.path / TRACKED_ALERTS_FILE
        return file.exists() and decode(SentAlerts, file.read_bytes()).seq >= seq

    return condition


def tracking(config, tracker):
    async def work(service):
        async with (
            service.until_drained(),
            open_tracking(config.path, config.training.sample_rows, [tracker]) as opened,
        ):
            await opened.resume(5)
            await track_alerts(service, config.path, config.health.webhook_from, opened)

    return work


def severities(tracker):
    return [call[2].changes[0].severity for call in tracker.calls if call[0] == "alert"]


async def test_changes_come_in_order_and_not_those_before_there_was_a_tracker(lab, config):
    await publish(lab, "halt")
    tracker = Recorder()
    async with lab.running(tracking(config, tracker), "trainer"):
        await lab.until(sent_up_to(config, 1))
        await publish(lab, "warn", "warn", "quarantine", "ok")
        await lab.until(sent_up_to(config, 5))
    assert severities(tracker) == ["warn", "quarantine", "ok"]
    assert {call[1] for call in tracker.calls if call[0] == "alert"} == {5}


async def test_an_alert_that_was_not_yet_taken_comes_again_after_a_kill(lab, config, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.trainer.tracking.CLOSE_S", 0.05)
    stuck = Recorder()
    async with lab.running(tracking(config, stuck), "trainer"):
        await lab.until(sent_up_to(config, 0))
        stuck.free.clear()
        await publish(lab, "quarantine")
        await anyio.lowlevel.checkpoint()  # it may or may not have begun
    tracker = Recorder()
    async with lab.running(tracking(config, tracker), "trainer"):
        await lab.until(sent_up_to(config, 1))
    assert severities(tracker) == ["quarantine"]
    stuck.free.set()


async def test_a_damaged_file_sends_nothing_old(lab, config, caplog):
    await publish(lab, "halt")
    config.path.mkdir(parents=True, exist_ok=True)
    (config.path / TRACKED_ALERTS_FILE).write_bytes(b"junk")
    tracker = Recorder()
    async with lab.running(tracking(config, tracker), "trainer"):

        async def restored():
            return (config.path / TRACKED_ALERTS_FILE).read_bytes() != b"junk"

        await lab.until(restored)
        await publish(lab, "ok")
        await lab.until(sent_up_to(config, 2))
    assert severities(tracker) == ["ok"]
    assert "cannot be read" in caplog.text
