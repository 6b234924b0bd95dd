import pytest

from lachesis.pipeline.stage import health as module
from lachesis.pipeline.stage.health import Health


def test_busy_seconds_are_those_of_every_slot_and_count_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s)
    health = Health()
    health.slots = 2
    with health.working(4):
        now_s = 3.0
        with health.working():
            now_s = 5.0
            told = health.report()
    now_s = 9.0
    assert (told.busy_s, told.in_flight, told.slots) == (7.0, 4, 2)
    assert (health.report().busy_s, health.report().in_flight) == (7.0, 0)


def test_a_service_without_work_of_its_own_tells_none() -> None:
    told = Health().report()
    assert (told.slots, told.busy_s) == (None, None)
