"""Confidence intervals of alpha: coverage where the truth is known, and the same bits in any order."""

import random

import numpy as np
import pytest

from lachesis.pipeline.scoring.logic.intervals import StreamingCI, alpha_interval
from lachesis.pipeline.scoring.logic.krippendorff import IntervalAlpha

RATERS = 4


def units(n: int, rng: np.random.Generator, noise: float = 0.5, missing: float = 0.1) -> list[list[float | None]]:
    truth = rng.normal(size=n)
    ratings = truth[:, None] + noise * rng.normal(size=(n, RATERS))
    gone = rng.random((n, RATERS)) < missing
    return [
        [None if lost else float(x) for x, lost in zip(row, lacks, strict=True)]
        for row, lacks in zip(ratings, gone, strict=True)
    ]


TRUE_ALPHA = 1.0 / (1.0 + 0.5**2)
"""Between-unit variance over total variance: the interval alpha of this model in the limit."""


@pytest.mark.parametrize(("n", "method"), [(30, "jackknife"), (200, "bootstrap")])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(n: int, method: str) -> None:
    rng = np.random.default_rng(n)
    held, trials = 0, 200
    for _ in range(trials):
        found = alpha_interval(units(n, rng), replicates=300)
        assert found is not None
        assert found.method == method
        held += found.low <= TRUE_ALPHA <= found.high
    assert 0.87 <= held / trials <= 0.99


def test_the_streaming_interval_agrees_with_the_recorded_one() -> None:
    recorded = units(400, np.random.default_rng(1))
    streaming = StreamingCI(replicates=400)
    for i, unit in enumerate(recorded):
        streaming.add_unit(f"unit-{i}", unit)
    one, other = alpha_interval(recorded), streaming.interval()
    assert one is not None
    assert other is not None
    width = one.high - one.low
    assert abs(one.low - other.low) < 0.25 * width
    assert abs(one.high - other.high) < 0.25 * width


def test_order_sharding_and_a_way_back_leave_the_same_bits() -> None:
    recorded = [(f"unit-{i}", unit) for i, unit in enumerate(units(100, np.random.default_rng(2)))]
    straight = StreamingCI()
    for name, unit in recorded:
        straight.add_unit(name, unit)
    shuffled = list(recorded)
    random.Random(0).shuffle(shuffled)
    shards = [StreamingCI(), StreamingCI()]
    for i, (name, unit) in enumerate(shuffled):
        shards[i % 2].add_unit(name, unit)
    shards[0].add_unit("extra", [1.0, 0.0])
    shards[0].add_unit("extra", [1.0, 0.0], -1)
    shards[0].merge(shards[1])
    assert shards[0].interval() == straight.interval()
    assert StreamingCI.from_state_dict(straight.state_dict()).interval() == straight.interval()


def test_the_middle_replicate_is_near_alpha_itself() -> None:
    recorded = units(500, np.random.default_rng(3))
    whole = IntervalAlpha()
    streaming = StreamingCI()
    for i, unit in enumerate(recorded):
        whole.add_unit(unit)
        streaming.add_unit(str(i), unit)
    found, value = streaming.interval(level=0.02), whole.alpha().value
    assert found is not None
    assert value is not None
    assert abs((found.low + found.high) / 2 - value) < 0.01


@pytest.mark.parametrize("recorded", [[], [[1.0, None]], [[0.5, 0.5]] * 100, [[0.5, 0.5]] * 10, [[1.0, 0.0]]], ids=str)
def test_what_is_undefined_has_no_interval(recorded: list[list[float | None]]) -> None:
    assert alpha_interval(recorded) is None
    streaming = StreamingCI(20)
    for i, unit in enumerate(recorded):
        streaming.add_unit(str(i), unit)
    if len({tuple(unit) for unit in recorded}) != 1 or recorded[0] != [1.0, 0.0]:
        assert streaming.interval() is None


def test_replicates_must_match() -> None:
    with pytest.raises(ValueError, match="replicates"):
        StreamingCI(10).merge(StreamingCI(20))
