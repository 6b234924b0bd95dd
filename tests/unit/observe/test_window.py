import itertools
from collections.abc import Mapping, Sequence

import pytest

from lachesis.pipeline.bus.api import ConsumerLag
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.services.observe.notices import outcome_notices
from lachesis.services.observe.overview import RewardCurve, by_outcome, look_back, overview_at
from lachesis.services.observe.window import Recent, StageRow

S = 1_000_000_000


class Stage:
    """A stage that speaks once a second."""

    def __init__(self, recent: Recent, service: str = "scorer", instance: str = "1-a") -> None:
        self.recent, self.service, self.instance = recent, service, instance
        self.process = Histogram()

    def beat(
        self, at_s: float, took: Sequence[float] = (), metrics: Mapping[str, float] | None = None, **vitals: object
    ) -> None:
        for seconds in took:
            self.process.record(seconds)
        told = StageVitals(process=self.process.pack(), **vitals)  # type: ignore[arg-type]
        beat = Heartbeat(
            host="h", schema_version=1,
            run="r", service=self.service, instance=self.instance, pid=1, time_ns=int(at_s * S), stage=told,
            metrics=dict(metrics or {}),
        )  # fmt: skip
        self.recent.heartbeat(beat, at_s)


def only(recent: Recent, now_s: float) -> StageRow:
    (row,) = recent.rows(now_s)
    return row


def test_figures_are_of_the_window_and_not_of_all_that_was() -> None:
    recent = Recent(10.0)
    stage = Stage(recent)
    for second in range(60):  # slow and busy at first, then quick and idle
        slow = second < 40
        stage.beat(
            second, took=[2.0] * 4 if slow else [0.01], handled=4 * min(second, 40) + max(0, second - 40), slots=8,
            busy_s=8.0 * min(second, 40), lag=second,
        )  # fmt: skip
    row = only(recent, 59.0)
    assert row.process.p99 == pytest.approx(0.01, rel=0.02)
    assert (row.in_per_s, row.load) == (1.0, 0.0)
    assert row.lag_per_s == pytest.approx(1.0)
    assert row.state == "ok"


def test_replicas_add_up_and_one_that_was_replaced_does_not_count() -> None:
    recent = Recent(10.0)
    a, b, dead = Stage(recent), Stage(recent, instance="2-b"), Stage(recent, instance="3-c")
    for second in range(20):
        a.beat(second, handled=second, slots=2, busy_s=2.0 * second)
        b.beat(second, handled=3 * second, slots=2, busy_s=0.0)
        if second < 10:
            dead.beat(second, handled=100 * second, slots=2, busy_s=2.0 * second)
    row = only(recent, 19.0)
    assert (row.instances, row.in_per_s, row.load) == (2, 4.0, 0.5)


def test_a_stage_whose_heartbeats_stopped_is_stale_and_its_backlog_still_known() -> None:
    recent = Recent(10.0, {"scorer"})
    assert only(recent, 0.0).state == "silent"
    Stage(recent).beat(0.0, lag=1)
    for second in range(10):
        recent.consumer("scorer", ConsumerLag(pending=second, unacked=2, redelivered=0, ack_floor=0), second)
    row = only(recent, 9.0)
    assert (row.state, row.instances, row.load, row.in_per_s) == ("stale", 0, None, None)
    assert (row.lag, row.unacked) == (11, 2)
    assert row.lag_per_s == pytest.approx(1.0)


def test_what_a_service_does_not_tell_is_none() -> None:
    recent = Recent(10.0)
    stage = Stage(recent, "governor")
    stage.beat(0.0)
    row = only(recent, 0.5)
    assert (row.load, row.lag, row.lag_per_s, row.in_per_s, row.process.p50) == (None, None, None, None, None)


def test_memory_is_bounded_by_the_window() -> None:
    recent = Recent(10.0)
    stage = Stage(recent)
    for second in range(1000):
        stage.beat(second)
        recent.consumer("scorer", ConsumerLag(0, 0, 0, 0), second)
    assert len(recent.figures("scorer")) <= 13
    assert len(recent._lags["scorer"]) <= 13


def test_the_training_is_seen_through_the_newest_heartbeats() -> None:
    recent, rewards = Recent(10.0), RewardCurve()
    trainer, batcher = Stage(recent, "trainer", "1-t"), Stage(recent, "batcher", "1-b")
    for second in range(11):
        step = second // 2
        metrics = {"train/step": step, "train/time": 2.0 * step, "train/tokens": 600.0, "reward/mean": 0.1 * step}
        trainer.beat(second, metrics=metrics, in_flight=4, slots=1, busy_s=float(second))
        rewards.record_step(metrics)
        batcher.beat(second, metrics={"batching/batches": step + 2, "batching/outcomes/batched": 40.0 * second})
    seen = overview_at("r", recent, rewards, 10.0)
    assert (seen.step, seen.s_per_step, seen.tokens_per_s, seen.groups_per_s) == (5, 2.0, 300.0, 40.0)
    assert seen.reward_trend == pytest.approx(0.1)
    row = next(row for row in seen.stages if row.service == "trainer")
    assert (row.lag, row.load, row.held) == (2, 1.0, 8.0)
    assert seen.bottleneck is not None
    assert seen.bottleneck.service == "trainer"


@pytest.mark.parametrize(
    ("outcomes", "warned"),
    [({"zero_variance": 15, "unscorable": 5}, True), ({"zero_variance": 19}, False), ({}, False),
     ({"zero_variance": 500, "batched": 1}, False), ({"stale": 500}, False)],
)  # fmt: skip
def test_a_run_that_learns_nothing_is_warned_of(outcomes: dict[str, int], warned: bool) -> None:
    assert bool(outcome_notices(outcomes)) is warned


def test_a_ledgers_totals_of_sequences_are_no_outcomes() -> None:
    totals = {"stale": 1, "batched": 2, "sequences": 12, "batched_sequences": 8}
    assert by_outcome(totals) == {"batched": 2, "stale": 1}
    assert look_back("r", [], [], totals).outcomes == {"batched": 2, "stale": 1}


def test_rewards_are_kept_for_a_while() -> None:
    rewards = RewardCurve()
    for step in itertools.islice(itertools.count(), 1000):
        rewards.record_step({"train/step": step, "reward/mean": 0.5})
        rewards.record_step({"train/step": step, "reward/mean": 0.5})
    assert len(rewards.values()) == 200
    assert rewards.trend() == pytest.approx(0.0)
