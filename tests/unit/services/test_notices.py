"""The supervisor logs each thing once, however often heartbeats repeat it."""

import logging
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.telemetry.heartbeat_log import SharedName
from lachesis.schemas.control import Heartbeat, StageVitals, StopKind
from lachesis.services.supervisor.notices import Notices


def beat(
    service: str,
    *,
    state: str = "ok",
    note: str | None = None,
    stopped: dict[str, list[StopKind]] | None = None,
    at_s: float = 0.0,
    instance: str = "1-a",
    **metrics: float,
) -> Heartbeat:
    stage: Any = StageVitals(state=state, note=note)
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Heartbeat(
        run="r",
        service=service,
        instance=instance,
        pid=1,
        time_ns=round(at_s * 1e9),
        stage=stage,
        metrics=named,
        stopped=stopped or {},
    )


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "lachesis")
    return caplog


def test_a_stopped_environment_is_logged_once_and_again_after_it_went_on(logged: pytest.LogCaptureFixture) -> None:
    notices = Notices(RunConfig())
    stops: list[dict[str, list[StopKind]]] = [
        {},
        {"a/b": ["quarantined"]},
        {"a/b": ["quarantined"], "c": []},
        {"a/b": ["halted", "quarantined"]},
        {},
        {"a/b": ["halted"]},
    ]
    for stopped in stops:
        notices.report(beat("health", stopped=stopped), evaluates=True)
    said = [text.partition(" by ")[0] for text in logged.messages]
    assert said == ["a/b is quarantined", "a/b is halted", "a/b is halted"]


def test_a_broken_ledger_is_logged_once_and_remembered(logged: pytest.LogCaptureFixture) -> None:
    notices = Notices(RunConfig())
    for _ in range(2):
        notices.report(beat("health", note="entry 7 does not fit", ledger__broken=1.0), evaluates=True)
    assert notices.ledger_broken == "entry 7 does not fit"
    assert logged.text.count("the ledger is broken: entry 7 does not fit") == 1


def test_the_last_step_is_logged_while_something_is_still_evaluated(logged: pytest.LogCaptureFixture) -> None:
    config = RunConfig(training=TrainingConfig(steps=3))
    for evaluates, times in ((False, 0), (True, 1)):
        logged.clear()
        notices = Notices(config)
        for step in (2.0, 3.0, 3.0):
            notices.report(beat("trainer", train__step=step), evaluates=evaluates)
        assert logged.text.count("all 3 steps are taken") == times


def test_what_is_not_evaluated_is_logged_once_and_not_while_the_evaluator_waits(
    logged: pytest.LogCaptureFixture,
) -> None:
    notices = Notices(RunConfig())
    notices.report(beat("evaluator", state="waiting", note="waits for the server"), evaluates=True)
    for _ in range(2):
        notices.report(beat("evaluator", note="sums has no tasks"), evaluates=True)
    assert [record.getMessage() for record in logged.records] == ["sums has no tasks"]


def test_a_long_wait_is_logged_once_and_so_is_its_end(logged: pytest.LogCaptureFixture) -> None:
    notices = Notices(RunConfig())
    for at_s in range(40):
        note = f"group {at_s:032x}: rater judge: unavailable (tried since 19:29:{at_s})"
        notices.report(beat("scorer", state="waiting", note=note, at_s=at_s), evaluates=False)
        assert bool(logged.messages) == (at_s >= 10)
    for at_s in (40, 41):
        notices.report(beat("scorer", at_s=at_s), evaluates=False)
    waited, went_on = logged.messages
    assert waited.startswith("scorer has been waiting for 10 s: group ")
    assert "rater judge: unavailable" in waited
    assert went_on == "scorer goes on after 40 s"
    for at_s in range(50, 62):
        notices.report(beat("scorer", state="waiting", note="x", at_s=at_s), evaluates=False)
    assert logged.messages[2:] == ["scorer has been waiting for 10 s: x"]


def test_processes_that_wait_for_one_thing_are_one_line_and_each_thing_has_its_own(
    logged: pytest.LogCaptureFixture,
) -> None:
    notices = Notices(RunConfig())
    for at_s in range(20):
        for instance in "ab":
            note = f"LEDGER has no leader, stalled for {at_s} s"
            notices.report(beat("batcher", state="waiting", note=note, at_s=at_s, instance=instance), evaluates=False)
        notices.report(beat("scorer", state="waiting", note="judge", at_s=at_s, instance="c"), evaluates=False)
    assert len(logged.messages) == 2
    assert [text.partition(" has")[0] for text in logged.messages] == ["batcher", "scorer"]


def test_a_process_that_ended_while_it_waited_hides_no_later_wait(logged: pytest.LogCaptureFixture) -> None:
    notices = Notices(RunConfig())
    for start_s, instance in ((0, "a"), (100, "b")):
        for at_s in range(start_s, start_s + 12):
            notices.report(beat("scorer", state="waiting", note="judge", at_s=at_s, instance=instance), evaluates=False)
    assert len(logged.messages) == 2


@pytest.mark.parametrize(
    ("service", "state", "lines"),
    [("environment-x", "backpressure", 0), ("governor", "backpressure", 1), ("scorer", "starting", 0)],
)
def test_an_environment_at_its_limit_is_no_wait_and_a_governor_that_admits_nothing_is(
    logged: pytest.LogCaptureFixture, service: str, state: str, lines: int
) -> None:
    notices = Notices(RunConfig())
    for at_s in range(30):
        notices.report(beat(service, state=state, note="full", at_s=at_s), evaluates=False)
    assert len(logged.messages) == lines


def test_a_shared_name_is_logged_once(logged: pytest.LogCaptureFixture) -> None:
    notices = Notices(RunConfig())
    for _ in range(3):
        notices.report_shared_names([SharedName("scorer", "gpu-1", ("pid 1 on gpu-1", "pid 2 on gpu-1"))])
    assert len(logged.messages) == 1
    assert "call themselves replica gpu-1 (pid 1 on gpu-1, pid 2 on gpu-1)" in logged.messages[0]
    assert "--replica" in logged.messages[0]


def test_a_problem_is_logged_once_however_many_processes_say_it_and_however_it_grows(
    logged: pytest.LogCaptureFixture,
) -> None:
    notices = Notices(RunConfig())
    for number, instance in ((1, "1-a"), (2, "1-a"), (5, "2-b")):
        stage = StageVitals(problems=[f"environment e: {number} of 9 tasks", "rater m: error"])
        notices.report(msgspec.structs.replace(beat("scorer", instance=instance), stage=stage), evaluates=True)
    assert logged.messages == ["scorer: environment e: 1 of 9 tasks", "scorer: rater m: error"]


def test_a_problem_takes_a_bounded_part_of_the_log(logged: pytest.LogCaptureFixture) -> None:
    stage = StageVitals(problems=["x" * 100_000, "x" * 99_999])
    Notices(RunConfig()).report(msgspec.structs.replace(beat("scorer"), stage=stage), evaluates=True)
    assert [len(text) for text in logged.messages] == [len("scorer: ") + 1000]
