from typing import get_args

from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.control import Heartbeat, StageState, StageVitals
from lachesis.services.observe import services
from lachesis.services.observe.services import merge


def beat(instance: str, **vitals: object) -> Heartbeat:
    stage = StageVitals(**vitals)  # type: ignore[arg-type]
    return Heartbeat(
        host="h",
        schema_version=1,
        run="r",
        service="scorer",
        instance=instance,
        pid=1,
        time_ns=0,
        stage=stage,
        metrics={},
    )


def test_every_state_has_its_place() -> None:
    assert set(services._WORST_FIRST) == set(get_args(StageState))


def test_replicas_are_taken_together() -> None:
    slow, fast = Histogram.of([1.0] * 50), Histogram.of([0.001] * 50)
    (row,) = merge(
        [
            beat("a", handled=50, lag=7, state="ok", wait=slow.pack(), note="n"),
            beat("b", handled=50, lag=7, state="waiting", wait=fast.pack()),
        ],
        {"scorer"},
    )
    assert (row.handled, row.lag, row.state, row.instances, row.notes) == (100, 7, "waiting", ["a", "b"], ["n"])
    both = Histogram.of([1.0] * 50 + [0.001] * 50)
    assert (row.wait.p50, row.wait.p99) == (both.quantile(0.5), both.quantile(0.99))
    assert row.process.p50 is None


def test_what_is_not_known_is_none() -> None:
    (row,) = merge([], {"scorer"})
    assert (row.service, row.state, row.handled, row.lag) == ("scorer", "silent", None, None)
    (row,) = merge([beat("a", lag=None)], set())
    assert (row.lag, row.handled) == (None, None), "without slots it works on no groups"
    (row,) = merge([beat("a", slots=4)], set())
    assert row.handled == 0
