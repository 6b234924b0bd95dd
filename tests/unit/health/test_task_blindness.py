"""Raters that come to pay answers whatever the task is."""

import random

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.health.logic.task_blindness import TaskBlindness
from lachesis.schemas.annotations import GroupScore


def groups(n: int, right, tricked, form=lambda t: 0.5, *, seed: int = 0, one_in: int = 16):
    """Yield scores of a judge that pays right answers, tricked ones whatever the task, and form a little."""
    rng = random.Random(seed)
    for i in range(n):
        own, other = [], []
        for _ in range(8):
            trick, good, formed = (rng.random() < share(i / n) for share in (tricked, right, form))
            base = 0.15 * formed + 0.1
            noise = [0.08 * rng.gauss(0, 1) for _ in range(2)]
            own.append(0.9 + noise[0] if trick else base + 0.6 * good + noise[0])
            other.append(0.9 + noise[1] if trick else base + noise[1])
        yield GroupScore(
            group=f"{i:032x}", seq=i + 1, item=f"{i}", policy_step=i // 16, scores=own, lengths=[9] * 8,
            ratings={"judge": own, "form": [1.0] * 8},
            controls={"judge": other, "form": [1.0] * 8} if i % one_in == 0 else {},
        )  # fmt: skip


def results(scores):
    check, window, found = TaskBlindness(), HealthWindow(), []
    for score in scores:
        window.scores.append(score)
        if len(window.scores) == 64:
            found.append(check.evaluate(window))
            window = HealthWindow()
            again = TaskBlindness()
            again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(check.state_dict())))
            assert again.state_dict() == check.state_dict()
            check = again
    return found


def level(value: float):
    return lambda t: value


def test_a_rater_that_a_trick_fools_is_named():
    found = results(groups(4096, level(0.3), lambda t: max(0.0, t - 0.5)))
    assert not any(one.severity in {"warn", "quarantine"} for one in found[:32])
    assert (found[-1].severity, found[-1].grows) == ("warn", False)
    assert found[-1].reason.startswith("judge pays for any task: of the answers that it rates high it also rated 0.")
    first = next(i for i, one in enumerate(found) if one.severity != "ok" and i > 32)
    assert first <= 48  # a quarter of the answers are tricked there


@pytest.mark.parametrize(
    ("right", "form"),
    [
        (lambda t: 0.1 + 0.85 * t, level(0.5)),
        (level(0.3), lambda t: 0.1 + 0.9 * t),
        (lambda t: 0.8 - 0.6 * t, level(0.5)),
        (level(1.0), level(1.0)),
    ],
    ids=["learns", "form alone", "forgets", "nothing left to learn"],
)
def test_a_policy_that_learns_or_forgets_is_left_alone(right, form):
    found = results(groups(4096, right, level(0.0), form))
    assert {one.severity for one in found} <= {"idle", "ok"}


def test_a_rater_that_looks_at_no_task_from_the_start_is_not_judged():
    assert {one.severity for one in results(groups(2048, level(0.3), level(0.8)))} <= {"idle", "ok"}


def test_without_controls_there_is_nothing_to_judge_by():
    assert {one.severity for one in results(groups(1024, level(0.3), level(0.5), one_in=1 << 20))} == {"idle"}


def test_missing_ratings_are_left_out():
    scores = [
        msgspec.structs.replace(score, controls={name: [None] * 8 for name in score.controls})
        for score in groups(2048, level(0.3), lambda t: t)
    ]
    assert {one.severity for one in results(scores)} == {"idle"}


@pytest.mark.slow
def test_the_monitor_warns_for_it_and_stops_nothing():
    monitor, warned = EnvMonitor(HealthConfig()), False
    for score in groups(4096, level(0.3), lambda t: max(0.0, t - 0.5)):
        monitor.score(score)
        if monitor.window_full:
            warned |= ("task_blindness", "warn") in {(one.check, one.severity) for one in monitor.evaluate()}
    assert monitor.standing.quarantined_from is None
    assert warned
