import pytest

from lachesis.pipeline.runtime import service_metrics as module
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics


def test_busy_seconds_are_those_of_every_slot_and_count_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now_s)
    vitals = ServiceMetrics()
    vitals.slots = 2
    with vitals.working(4):
        now_s = 3.0
        with vitals.working():
            now_s = 5.0
            told = vitals.report()
    now_s = 9.0
    assert (told.busy_s, told.in_flight, told.slots) == (7.0, 4, 2)
    assert (vitals.report().busy_s, vitals.report().in_flight) == (7.0, 0)


def test_a_service_without_work_of_its_own_tells_none() -> None:
    told = ServiceMetrics().report()
    assert (told.slots, told.busy_s) == (None, None)
