"""Which traces are kept."""

import pytest

from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import Figures
from lachesis.pipeline.telemetry.sampling import Keeper, is_sampled
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span
from lachesis.pipeline.telemetry.tracing import Tracing
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


def test_what_went_wrong_is_kept_and_the_rest_is_not() -> None:
    keeper = Keeper(0.0, slow_s=10.0)
    group = new_group_id()
    assert keeper.reason(group, ONCE, 1.0, failed=False) is None
    assert keeper.reason(group, ONCE, 10.5, failed=False) == "slow"
    assert keeper.reason(group, AGAIN, 1.0, failed=False) == "redelivered"
    assert keeper.reason(group, AGAIN, 11.0, failed=True) == "failed"
    assert keeper.kept_ratio == 0.75


def test_without_a_limit_slow_is_slower_than_99_of_100() -> None:
    keeper = Keeper(0.0, slow_s=None)
    for i in range(200):
        assert keeper.reason(new_group_id(), ONCE, 1.0 + i / 1000, failed=False) is None
    assert keeper.reason(new_group_id(), ONCE, 1.1, failed=False) is None
    assert keeper.reason(new_group_id(), ONCE, 1.5, failed=False) == "slow"


class _Kept:
    traces = True
    dropped = 0

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def emit(self, spans: list[Span]) -> None:  # type: ignore[override]
        self.spans += spans

    def observe(self, figures: Figures) -> None:
        pass


def _end(group: str) -> RolloutEnd:
    return RolloutEnd(
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


def test_a_sampled_rollout_ends_with_its_root_and_another_kept_one_is_rebuilt() -> None:
    sampled = _Kept()
    Tracing(TelemetryConfig(ratio=1.0), sampled).end(_end(new_group_id()), AGAIN)
    assert [span.name for span in sampled.spans] == ["rollout e"]
    assert sampled.spans[0].attributes["rl.sampling.reason"] == "ratio"
    kept = _Kept()
    Tracing(TelemetryConfig(ratio=0.0), kept).end(_end(new_group_id()), AGAIN)
    assert len(kept.spans) == 4
    assert kept.spans[-1].attributes["rl.sampling.reason"] == "redelivered"
    ordinary = _Kept()
    Tracing(TelemetryConfig(ratio=0.0), ordinary).end(_end(new_group_id()), ONCE)
    assert not ordinary.spans


def test_without_a_sink_nothing_is_sampled() -> None:
    tracing = Tracing(TelemetryConfig(ratio=1.0))
    assert not tracing.sampled(new_group_id())
    tracing.end(_end(new_group_id()), AGAIN)
