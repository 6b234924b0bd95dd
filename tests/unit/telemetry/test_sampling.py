"""Which traces are kept."""

import msgspec
import pytest

from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.sampling import SLOW_WINDOW, RecentHistogram, TraceSampler, is_late, is_sampled
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span
from lachesis.pipeline.telemetry.tracing import TraceIncident, Tracing
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.ids import new_group_id


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5])
def test_the_sampled_share_is_the_share_asked_for(ratio: float) -> None:
    n = 20_000
    share = sum(is_sampled(new_group_id(), ratio) for _ in range(n)) / n
    assert abs(share - ratio) < 5 * (ratio * (1 - ratio) / n) ** 0.5


def test_none_and_all() -> None:
    groups = [new_group_id() for _ in range(1000)]
    assert not any(is_sampled(group, 0.0) for group in groups)
    assert all(is_sampled(group, 1.0) for group in groups)


def test_a_larger_share_holds_the_smaller_one() -> None:
    groups = [new_group_id() for _ in range(1000)]
    assert all(is_sampled(group, 0.3) for group in groups if is_sampled(group, 0.1))


ONCE, AGAIN = [Stamp("scorer", 0, 1, 2)], [Stamp("scorer", 0, 1, 2, 2)]


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("dead", "failed"), ("unscorable", "failed"), ("oversized", "failed"), ("lease_expired", "failed"),
        ("void", "failed"), ("stale", "stale"), ("zero_variance", None), ("quarantined", None), ("untrainable", None),
        (None, None),
    ],
)  # fmt: skip
def test_an_end_that_nobody_chose_is_kept_and_one_that_a_setting_asks_for_is_not(
    cause: str | None, reason: str | None
) -> None:
    assert TraceSampler(0.0, slow_s=10.0).reason(new_group_id(), ONCE, 1.0, cause=cause) == reason


def test_of_several_reasons_the_one_that_says_most_counts() -> None:
    group = new_group_id()
    assert TraceSampler(0.0, 10.0).reason(group, ONCE, 1.0) is None
    assert TraceSampler(1.0, 10.0).reason(group, ONCE, 1.0) == "ratio"
    assert TraceSampler(1.0, 10.0).reason(group, ONCE, 10.5) == "slow"
    assert TraceSampler(1.0, 10.0).reason(group, AGAIN, 10.5) == "redelivered"
    assert TraceSampler(1.0, 10.0).reason(group, AGAIN, 10.5, late=True) == "late"
    assert TraceSampler(1.0, 10.0).reason(group, AGAIN, 10.5, late=True, cause="stale") == "stale"
    assert TraceSampler(1.0, 10.0).reason(group, AGAIN, 10.5, late=True, cause="dead") == "failed"


def test_the_share_kept_is_of_all_that_ended() -> None:
    keeper = TraceSampler(0.0, slow_s=10.0)
    for e2e_s in (1.0, 11.0, 2.0, 12.0):
        keeper.reason(new_group_id(), ONCE, e2e_s)
    assert keeper.sampled_ratio == 0.5


def test_a_teacher_that_did_not_come_in_time_is_known_by_its_missing_stamp() -> None:
    assert is_late(ONCE)
    assert not is_late([*ONCE, Stamp("teacher", 0, 1, 2)])
    assert not is_late([])


def test_without_a_limit_slow_is_slower_than_99_of_100() -> None:
    keeper = TraceSampler(0.0, slow_s=None)
    for i in range(200):
        assert keeper.reason(new_group_id(), ONCE, 1.0 + i / 1000) is None
    assert keeper.reason(new_group_id(), ONCE, 1.1) is None
    assert keeper.reason(new_group_id(), ONCE, 1.5) == "slow"


def test_a_stall_at_the_start_does_not_hide_what_is_slow_later() -> None:
    keeper = TraceSampler(0.0, slow_s=None)
    for _ in range(300):
        keeper.reason(new_group_id(), ONCE, 14.0)  # two minutes without a trainer
    kept = [keeper.reason(new_group_id(), ONCE, 1.0 + i % 100 / 1e3) for i in range(2 * SLOW_WINDOW)]
    assert kept.count("slow") < 0.03 * len(kept)
    assert keeper.reason(new_group_id(), ONCE, 5.0) == "slow"


def test_a_window_forgets_what_is_older_than_both_its_halves() -> None:
    window = RecentHistogram(10)
    for _ in range(10):
        window.record(100.0)
    for i in range(10):
        window.record(1.0)
        assert (window.count, window.quantile(1.0)) == (11 + i, pytest.approx(100.0, rel=0.02))
    window.record(1.0)
    assert (window.count, window.quantile(1.0)) == (11, pytest.approx(1.0, rel=0.02))
    assert RecentHistogram(3).quantile(0.5) is None


class _Kept:
    traces = True
    dropped = 0
    problem: str | None = None

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def emit(self, spans: list[Span]) -> None:  # type: ignore[override]
        self.spans += spans

    def observe(self, figures: ServiceFigures) -> None:
        pass


def _end(group: str, **fields: object) -> RolloutEnd:
    end = RolloutEnd(
        group=group,
        run="r",
        env="e",
        seq=1,
        sequences=4,
        policy_step=0,
        started_ns=0,
        ended_ns=10**9,
        outcome="trained",
    )
    return msgspec.structs.replace(end, **fields)


def test_a_sampled_rollout_ends_with_its_root_and_another_kept_one_is_rebuilt() -> None:
    sampled = _Kept()
    assert Tracing(TelemetryConfig(ratio=1.0), sampled).end(_end(new_group_id()), ONCE) == "ratio"
    assert [span.name for span in sampled.spans] == ["rollout"]
    assert sampled.spans[0].attributes["rl.sampling.reason"] == "ratio"
    again = _Kept()
    assert Tracing(TelemetryConfig(ratio=1.0), again).end(_end(new_group_id()), AGAIN) == "redelivered"
    assert [span.name for span in again.spans] == ["rollout"]  # the stages have exported theirs
    kept = _Kept()
    Tracing(TelemetryConfig(ratio=0.0), kept).end(_end(new_group_id()), AGAIN)
    assert [span.name.partition(" ")[0] for span in kept.spans] == ["generate", "process", "rollout"]
    assert kept.spans[-1].attributes["rl.sampling.reason"] == "redelivered"
    ordinary = _Kept()
    assert Tracing(TelemetryConfig(ratio=0.0), ordinary).end(_end(new_group_id()), ONCE) is None
    assert not ordinary.spans


def test_without_a_sink_nothing_is_sampled() -> None:
    tracing = Tracing(TelemetryConfig(ratio=1.0))
    assert not tracing.sampled(new_group_id())
    tracing.end(_end(new_group_id()), AGAIN)
    tracing.record_incident(new_group_id(), LATE)


LATE = TraceIncident(Stamp("teacher", 2_000, 6_000_000_000, 7_000_000_000, 2))
BROKEN = TraceIncident.of(Stamp("scorer", 2_000, 6_000, 7_000), ValueError("it broke"))


@pytest.mark.parametrize("before", [True, False], ids=["before its end", "after its end"])
def test_a_redelivery_that_no_stamp_of_the_end_tells_of_keeps_the_trace_whole_and_once(before: bool) -> None:
    sink, group = _Kept(), new_group_id()
    tracing = Tracing(TelemetryConfig(ratio=0.0, slow_s=3600.0), sink)
    if before:
        tracing.record_incident(group, LATE)
    reason = tracing.end(_end(group, outcome="dropped", cause="zero_variance"), ONCE)
    assert reason == ("redelivered" if before else None)
    tracing.record_incident(group, LATE)
    tracing.record_incident(group, LATE)
    names = [(span.service, span.name.partition(" ")[0]) for span in sink.spans]
    assert sorted(names) == [
        ("environment", "generate"), ("environment", "rollout"), ("scorer", "process"), ("teacher", "process"),
        ("teacher", "queue.wait"),
    ]  # fmt: skip
    (root,) = [span for span in sink.spans if span.parent is None]
    assert root.attributes["rl.sampling.reason"] == "redelivered"
    assert tracing.keeper.sampled_ratio == 1.0


def test_a_stage_that_comes_after_the_end_of_a_kept_rollout_adds_its_spans_to_the_trace() -> None:
    sink, group = _Kept(), new_group_id()
    tracing = Tracing(TelemetryConfig(ratio=0.0), sink)
    assert tracing.end(_end(group, outcome="dropped", cause="stale"), ONCE) == "stale"
    before = len(sink.spans)
    tracing.record_incident(group, LATE)
    waited, worked = sink.spans[before:]
    assert (waited.service, worked.service) == ("teacher", "teacher")
    assert worked.attributes["rl.delivery.attempt"] == 2
    assert sum(span.parent is None for span in sink.spans) == 1


@pytest.mark.parametrize("cause", ["dead", "quarantined"])
@pytest.mark.parametrize("before", [True, False], ids=["before its end", "after its end"])
def test_work_that_failed_is_in_the_trace_whatever_became_of_the_rollout(before: bool, cause: str) -> None:
    sink, group = _Kept(), new_group_id()
    tracing = Tracing(TelemetryConfig(ratio=0.0), sink)
    if before:
        tracing.record_incident(group, BROKEN)
    tracing.end(_end(group, outcome="dropped", cause=cause), [])
    if not before:
        tracing.record_incident(group, BROKEN)
    tracing.record_incident(group, BROKEN)
    (root,) = [span for span in sink.spans if span.parent is None]
    assert root.attributes["rl.sampling.reason"] == "failed"
    (worked,) = [span for span in sink.spans if span.name.startswith("process ")]
    assert (worked.service, worked.error, worked.attributes["error.type"]) == ("scorer", "it broke", "ValueError")


def test_what_is_remembered_of_rollouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lachesis.pipeline.telemetry.tracing._MAX_REMEMBERED", 3)
    sink = _Kept()
    tracing = Tracing(TelemetryConfig(ratio=0.0), sink)
    ended, announced = ([new_group_id() for _ in range(5)] for _ in range(2))
    for group in ended:
        tracing.end(_end(group), ONCE)
    for group in announced:
        tracing.record_incident(group, LATE)
    tracing.record_incident(ended[0], LATE)
    assert not sink.spans  # forgotten
    assert tracing.end(_end(announced[-1]), ONCE) == "redelivered"
    assert tracing.end(_end(announced[0]), ONCE) is None
