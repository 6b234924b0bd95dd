"""The service: heartbeats, the drain, retries."""

import re

import anyio
import pytest

from lachesis.pipeline.bus.server_waits import ServerStall
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.disk import SHORTAGES, DiskShortage
from lachesis.pipeline.errors import InfrastructureError, StreamFullError
from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.facts import ExpectedRun, Moment
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat


async def test_the_first_heartbeat_says_starting_and_the_last_says_draining(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.runtime.service.HEARTBEAT_S", 60.0)
    states = []
    async with lab.bus.listen(subjects.heartbeat("r")) as heard:
        async with open_service(lab.bus, "scorer", "r") as service:
            with anyio.fail_after(60):
                states.append(decode(Heartbeat, (await anext(heard)).data))
            service.drain()
        with anyio.fail_after(60):
            states.append(decode(Heartbeat, (await anext(heard)).data))
    assert [beat.stage.state for beat in states] == ["starting", "draining"]
    assert {beat.instance for beat in states} == {service.instance}


@pytest.mark.parametrize("begin", [Service.mark_ok, lambda service: service.mark_waiting("backpressure", "no lease")])
async def test_a_heartbeat_tells_at_once_that_the_service_has_started(lab, monkeypatch, begin):
    monkeypatch.setattr("lachesis.pipeline.runtime.service.HEARTBEAT_S", 60.0)
    async with lab.bus.listen(subjects.heartbeat("r")) as heard, open_service(lab.bus, "scorer", "r") as service:
        with anyio.fail_after(60):
            await anext(heard)
            begin(service)
            assert decode(Heartbeat, (await anext(heard)).data).stage.state != "starting"
        begin(service)
        with anyio.move_on_after(0.05):  # once
            pytest.fail(str(await anext(heard)))


async def test_a_full_disk_is_a_notice_of_the_service_while_it_waits_for_room(lab, tmp_path):
    service = Service(lab.bus, "trainer", "r")
    async with lab.bus.listen(subjects.heartbeat("r")) as heard:
        SHORTAGES.begin(DiskShortage(tmp_path / "checkpoint", "at least 7 bytes missing"))
        try:
            await service.heartbeat()
        finally:
            SHORTAGES.end(tmp_path / "checkpoint")
        beat = decode(Heartbeat, (await anext(heard)).data)
        (notice,) = beat.stage.notices
        assert "the disk is full: at least 7 bytes missing" in notice.what
        assert (notice.stops, notice.held_up) == (True, ["the next policy"])
        board = NoticeBoard(ExpectedRun())
        for second in range(20):
            board.hear(beat, float(second))
            assert [one.what for one in board.notices(Moment(float(second), 1))] == [notice.what]
        await service.heartbeat()
        assert decode(Heartbeat, (await anext(heard)).data).stage.notices == []


async def test_an_error_of_the_body_arrives_as_itself(lab):
    with pytest.raises(ZeroDivisionError):
        async with open_service(lab.bus, "scorer", "r"):
            raise ZeroDivisionError


async def test_retrying_raises_the_last_error_once_the_service_drains(lab):
    service = Service(lab.bus, "scorer", "r")
    tries = 0

    async def fail():
        nonlocal tries
        tries += 1
        if tries == 3:
            service.drain()
        raise InfrastructureError(f"down {tries}")

    with anyio.fail_after(60), pytest.raises(InfrastructureError, match="down 3"):
        await service.retrying("a thing")(fail)
    assert (tries, service.vitals.retried, service.vitals.state) == (3, 2, "draining")


async def test_a_drain_wakes_a_retry_that_sleeps(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.runtime.service.OUTAGE_POLICY", RetryPolicy(first_s=3600.0))
    service = Service(lab.bus, "scorer", "r")
    tried = anyio.Event()

    async def fail():
        tried.set()
        raise InfrastructureError("down")

    async def expect_failure():
        with pytest.raises(InfrastructureError, match="down"):
            await service.retrying("a thing")(fail)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_failure)
            await tried.wait()
            await anyio.lowlevel.checkpoint()
            service.drain()


async def test_other_errors_are_not_retried(lab):
    tries = 0

    async def fail():
        nonlocal tries
        tries += 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Service(lab.bus, "scorer", "r").retrying("a thing")(fail)
    assert tries == 1


async def test_a_cancelled_retry_is_cancelled(lab):
    service = Service(lab.bus, "scorer", "r")

    async def fail():
        raise InfrastructureError("down")

    with anyio.move_on_after(0.05) as scope:
        await service.retrying("a thing")(fail)
    assert scope.cancelled_caught


async def test_a_full_stream_shows_as_backpressure_and_anything_else_as_waiting(lab):
    service = Service(lab.bus, "scorer", "r")
    errors = [StreamFullError("full"), InfrastructureError("down")]
    states = []

    async def fail():
        states.append(service.vitals.state)
        if errors:
            raise errors.pop(0)

    await service.retrying("a thing")(fail)
    assert states == ["starting", "backpressure", "waiting"]
    assert re.fullmatch(r"a thing: down \(tried since \d\d:\d\d:\d\d UTC\)", service.vitals.status_text)
    service.mark_ok()
    assert (service.vitals.state, service.vitals.status_text) == ("ok", None)


async def test_until_drained_cancels_the_body_and_goes_on(lab):
    service = Service(lab.bus, "scorer", "r")

    async def drain_soon():
        await anyio.sleep(0.01)
        service.drain()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain_soon)
            async with service.until_drained():
                await anyio.sleep_forever()
        async with service.until_drained():  # drained already
            await anyio.sleep_forever()


async def test_until_drained_lets_errors_through_until_the_drain(lab):
    service = Service(lab.bus, "scorer", "r")
    with pytest.raises(InfrastructureError):
        async with service.until_drained():
            raise InfrastructureError("down")
    service.drain()
    async with service.until_drained():
        raise InfrastructureError("down")
    with pytest.raises(ZeroDivisionError):
        async with service.until_drained():
            raise ZeroDivisionError


async def test_a_note_stays_until_it_no_longer_holds(lab):
    service = Service(lab.bus, "governor", "r")
    service.mark_ok()
    service.set_note("sizes", "stream sizes unknown")
    service.mark_waiting("waiting", "inference is away")
    assert service.vitals.status_text == "inference is away; stream sizes unknown"
    service.mark_ok()
    assert (service.vitals.state, service.vitals.status_text) == ("ok", "stream sizes unknown")
    service.set_note("sizes", None)
    service.set_note("sizes", None)
    assert service.vitals.status_text is None


async def test_a_stall_is_in_heartbeat_and_log_as_long_as_it_lasts(lab, monkeypatch, caplog):
    caplog.set_level("INFO", logger="lachesis")
    service = Service(lab.bus, "governor", "r")
    service.mark_ok()
    found = []
    async with lab.bus.listen(subjects.heartbeat("r")) as heard:
        for stall in (ServerStall("publish a", "no answer", 3), ServerStall("publish a", "no leader", 4), None, None):
            monkeypatch.setattr(type(lab.bus), "stall", stall)
            await service.heartbeat()
            with anyio.fail_after(60):
                stage = decode(Heartbeat, (await anext(heard)).data).stage
            found.append((stage.state, stage.note))
    assert found == [
        ("waiting", "stalled for 3 s: publish a: no answer"),
        ("waiting", "stalled for 4 s: publish a: no leader"),
        ("ok", None),
        ("ok", None),
    ]
    assert [record.message for record in caplog.records] == [
        "stalled for 3 s: publish a: no answer",
        "stalled for 4 s: publish a: no leader",
        "goes on after 3 s: no leader",
    ]


async def test_a_file_tells_probes_that_the_service_lives(lab, tmp_path) -> None:
    alive = tmp_path / "alive"
    async with lab.bus.listen(subjects.heartbeat("r")) as heard, open_service(lab.bus, "scorer", "r", alive_file=alive):
        beats = 0
        async for _ in heard:
            beats += 1
            if beats == 2:
                break
    assert alive.exists()
