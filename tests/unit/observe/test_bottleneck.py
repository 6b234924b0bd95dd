"""What limits a run, on the figures that each kind of run shows."""

import pytest

from lachesis.services.observe.bottleneck import find_bottleneck
from lachesis.services.observe.services import Quantiles
from lachesis.services.observe.window import StageRow


def stage(service: str, load: float | None = 0.1, held: float = 0.5, state: str = "ok", lag: int = 0) -> StageRow:
    return StageRow(service=service, state=state, instances=1, load=load, held=held, lag=lag)


def run(**changed: StageRow) -> list[StageRow]:
    """A run with nothing remarkable but what is `changed`."""
    names = ("environment-a", "scorer", "teacher", "normalizer", "batcher", "trainer", "governor", "inference-policy")
    rows = {name: stage(name) for name in names}
    rows["governor"] = StageRow(service="governor", state="ok", instances=1)
    return list((rows | {row.service: row for row in changed.values()}).values())


FLOW = {"flow/outstanding": 48.0, "flow/leased": 8.0, "flow/accepted": 24.0, "flow/untrained": 16.0}


def named(rows: list[StageRow], **flow: float) -> str | None:
    found = find_bottleneck(rows, FLOW | {f"flow/{name}": value for name, value in flow.items()})
    return found.service if found else None


@pytest.mark.parametrize("slow", ["environment-a", "scorer", "teacher", "normalizer", "batcher", "trainer"])
def test_a_stage_at_work_all_the_time_limits_the_run(slow: str) -> None:
    assert named(run(fuller=stage("scorer", 0.3, 8.0), slow=stage(slow, load=0.97, held=2.0))) == slow


def test_backpressure_is_a_consequence() -> None:
    held_back = stage("environment-a", load=0.2, held=1.0, state="backpressure")
    assert named(run(env=held_back, slow=stage("trainer", load=1.0, held=8.0))) == "trainer"


def test_a_queue_in_front_of_one_of_two_busy_stages_tells_which_is_slower() -> None:
    rows = run(env=stage("environment-a", load=1.0, held=4.0), scorer=stage("scorer", load=1.0, held=9.0, lag=9))
    assert named(rows) == "scorer"


def test_with_room_in_every_stage_the_time_spent_decides() -> None:
    """16 slots of which 10 are at work for long: more of them would not help, quicker work would."""
    assert (
        named(run(slow=stage("scorer", load=0.62, held=10.0), trainer=stage("trainer", load=0.7, held=2.0))) == "scorer"
    )


@pytest.mark.parametrize("state", ["stale", "waiting", "silent"])
def test_a_stage_that_is_not_there_stops_all(state: str) -> None:
    busy = stage("trainer", load=0.95, held=4.0)
    assert named(run(down=stage("scorer", None, 9.0, state, lag=9), busy=busy)) == "scorer"
    assert named(run(down=stage("normalizer", None, 0.0, state), busy=busy)) == "normalizer"
    assert named(run(down=stage("scorer", None, 0.0, state, lag=0), busy=busy)) == "trainer", "nothing waits for it"
    assert named(run(down=stage("environment-a", None, 0.0, state)), untrained=0) == "environment-a"
    assert named(run(down=stage("environment-a", None, 0.0, state), busy=busy), untrained=0) == "trainer"
    assert named(run(down=stage("trainer", None, 0.0, state)), untrained=32) == "trainer"


def test_one_environment_of_two_that_is_down_does_not_stop_the_other() -> None:
    rows = run(down=stage("environment-a", None, 0.0, "waiting"), other=stage("environment-b", 1.0, 8.0))
    assert named(rows, untrained=0) == "environment-b"


def test_without_a_governor_nothing_is_generated() -> None:
    assert named(run(down=stage("governor", None, 0.0, "stale"), busy=stage("trainer", 1.0, 8.0))) == "governor"


def test_a_run_that_has_not_begun_has_none() -> None:
    assert find_bottleneck([stage("scorer", None, 0.0)], {}) is None


def test_what_a_slow_environment_waits_for_is_told() -> None:
    server = StageRow(service="inference-policy", state="ok", instances=1, in_flight=8, lag=24)
    rows = run(slow=stage("environment-a", load=1.0, held=4.0), server=server)
    found = find_bottleneck(rows, FLOW)
    assert found is not None
    assert found.reason == "is at work 100 % of the time; inference-policy has 8 requests running, 24 queued"


def test_an_environment_that_is_slow_itself_is_told_from_one_that_waits_for_its_model() -> None:
    server = StageRow(service="inference-policy", state="ok", instances=1, in_flight=0, lag=0)
    slow = StageRow(
        service="environment-a",
        state="ok",
        instances=1,
        load=1.0,
        held=4.0,
        process=Quantiles(p50=2.35, p95=3.0, p99=3.0),
    )
    found = find_bottleneck(run(slow=slow, server=server), FLOW)
    assert found is not None
    assert found.reason == (
        "is at work 100 % of the time, 2.35 s each time (p50); inference-policy is idle at the moment"
    )


def test_an_environment_that_gets_no_lease_though_nothing_is_under_way_says_why() -> None:
    halted = StageRow(service="environment-a", state="backpressure", instances=1, held=0.0, notes=["a is halted"])
    found = find_bottleneck([halted, stage("scorer", 0.0, 0.0)], {"flow/outstanding": 0.0})
    assert found is not None
    assert (found.service, found.reason) == ("environment-a", "is held back: a is halted")
