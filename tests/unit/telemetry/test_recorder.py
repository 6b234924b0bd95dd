"""Recording what a stage does for a group, and the clock it is recorded on."""

import time

import anyio
import pytest

from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.recorder import current_traceparent, not_recording, recording, traced
from lachesis.schemas.ids import new_group_id


async def test_spans_of_concurrent_tasks_go_to_the_recorder_of_their_group() -> None:
    groups = [new_group_id(), new_group_id()]
    found = {}

    async def work(group: str) -> None:
        with recording(Clock(), "scorer", group, "ab" * 8) as spans:
            async with anyio.create_task_group() as raters:
                for name in ("exact", "format"):
                    raters.start_soon(rate, name)
        found[group] = spans

    async def rate(name: str) -> None:
        with traced(f"score {name}", "internal", {"rl.rater": name}) as attributes:
            await anyio.lowlevel.checkpoint()
            attributes["rl.samples"] = 4

    async with anyio.create_task_group() as tasks:
        for group in groups:
            tasks.start_soon(work, group)
    for group, spans in found.items():
        assert sorted(span.name for span in spans) == ["score exact", "score format"]
        assert {span.trace for span in spans} == {group}
        assert {span.parent for span in spans} == {"ab" * 8}
        assert len({span.id for span in spans}) == 2
        assert all(span.attributes["rl.samples"] == 4 for span in spans)
    assert set(found) == set(groups)


def test_without_a_recorder_nothing_is_recorded() -> None:
    with traced("score exact") as attributes:
        attributes["rl.samples"] = 4


def test_a_failure_is_in_the_span_and_goes_on() -> None:
    with recording(Clock(), "scorer", new_group_id(), "ab" * 8) as spans:
        with pytest.raises(ValueError, match="no"), traced("score exact"):
            raise ValueError("no")
        assert (spans[0].error, spans[0].attributes) == ("ValueError: no", {"error.type": "ValueError"})


def test_the_clock_is_the_servers_once_it_was_measured() -> None:
    clock = Clock()
    assert abs(clock.now_ns() - time.time_ns()) < 1_000_000_000
    sent = time.perf_counter_ns()
    server = time.time_ns() + 3_600_000_000_000
    clock.measured(sent, sent + 2_000_000, server + 1_000_000)
    assert clock.uncertainty_ns == 1_000_000
    assert abs(clock.now_ns() - time.time_ns() - 3_600_000_000_000) < 1_000_000_000
    first = clock.now_ns()
    assert clock.now_ns() >= first


def test_spans_lie_below_the_one_that_is_open_and_requests_name_it() -> None:
    group = new_group_id()
    assert current_traceparent() is None
    with recording(Clock(), "scorer", group, "ab" * 8) as spans:
        assert current_traceparent() == f"00-{group}-{'ab' * 8}-01"
        with traced("score judge"):
            outer = current_traceparent()
            with traced("chat judge", "client"):
                inner = current_traceparent()
            assert current_traceparent() == outer
        assert current_traceparent() == f"00-{group}-{'ab' * 8}-01"
    chat, score = spans
    assert (score.parent, chat.parent) == ("ab" * 8, score.id)
    assert (outer, inner) == (f"00-{group}-{score.id}-01", f"00-{group}-{chat.id}-01")


def test_requests_for_a_group_that_is_not_sampled_say_so() -> None:
    group = new_group_id()
    with not_recording(group) as spans, traced("score judge"):
        assert current_traceparent() == f"00-{group}-{group[16:]}-00"
    assert (spans, current_traceparent()) == ([], None)
