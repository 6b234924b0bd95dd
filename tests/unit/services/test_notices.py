"""The supervisor logs each thing once, however often heartbeats repeat it."""

import logging
from typing import Any

import pytest

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.schemas.control import Heartbeat, StageVitals, StopKind
from lachesis.services.supervisor.notices import Notices


def beat(
    service: str,
    *,
    state: str = "ok",
    note: str | None = None,
    stopped: dict[str, list[StopKind]] | None = None,
    **metrics: float,
) -> Heartbeat:
    stage: Any = StageVitals(state=state, note=note)
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return Heartbeat(
        run="r", service=service, instance="1-a", pid=1, time_ns=0, stage=stage, metrics=named, stopped=stopped or {}
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
