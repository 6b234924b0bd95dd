import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.telemetry.histogram import Histogram

seconds = st.floats(min_value=1e-9, max_value=1e6)


@given(st.lists(seconds, min_size=1, max_size=300), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_the_bucket_error(values: list[float], q: float) -> None:
    exact = float(np.quantile(values, q, method="inverted_cdf"))
    assert Histogram.of(values).quantile(q) == pytest.approx(exact, rel=2 ** (1 / 64) - 1 + 1e-9)


@given(st.lists(seconds, max_size=100), st.lists(seconds, max_size=100))
def test_merging_equals_counting_everything_in_one(left: list[float], right: list[float]) -> None:
    merged = Histogram.of(left)
    merged.merge(Histogram.of(right))
    whole = Histogram.of(left + right)
    assert merged.pack().counts == whole.pack().counts
    assert merged.pack().indexes == whole.pack().indexes
    assert merged.total == pytest.approx(whole.total)


def test_a_bimodal_p95_is_right() -> None:
    values = [0.001] * 94 + [2.0] * 6
    assert Histogram.of(values).quantile(0.95) == pytest.approx(2.0, rel=0.011)
    assert Histogram.of(values).quantile(0.94) == pytest.approx(0.001, rel=0.011)


@given(st.floats(1e-4, 1e-2), st.floats(1.0, 1e3), st.floats(0.005, 0.5), st.integers(1, 2**32), st.integers(200, 5000))
def test_p99_of_bimodal_times_is_within_the_stated_error(
    quick: float, slow: float, share: float, seed: int, count: int
) -> None:
    """Queue waits are like that: next to nothing for most, and seconds for the rest."""
    rng = np.random.default_rng(seed)
    centres = np.where(rng.random(count) < share, slow, quick)
    values = (centres * rng.lognormal(0.0, 0.3, count)).tolist()
    histogram = Histogram.of(values)
    for q in (0.5, 0.95, 0.99):
        exact = float(np.quantile(values, q, method="inverted_cdf"))
        assert histogram.quantile(q) == pytest.approx(exact, rel=0.011)


def test_nothing_counted_has_no_quantile() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().mean is None


def test_negative_values_count_as_zero_and_apart() -> None:
    histogram = Histogram.of([-0.5, 0.0, 1.0])
    assert (histogram.negatives, histogram.zeros, histogram.count) == (1, 2, 3)
    assert histogram.quantile(0.5) == 0.0


def test_a_packed_histogram_comes_back_the_same() -> None:
    histogram = Histogram.of([0.1, 0.2, 3.0])
    back = Histogram.unpack(histogram.pack())
    assert back.pack() == histogram.pack()
    back.record(0.1)
    assert back.count == 4


def test_an_empty_histogram_survives_packing() -> None:
    assert math.isinf(Histogram.unpack(Histogram().pack()).low)


def test_what_was_counted_since_an_earlier_look() -> None:
    whole = Histogram.of([4.0, 0.0, -1.0, 0.5])
    earlier = Histogram.unpack(whole.pack())
    for value in (0.01, 0.01, 0.0, 4.0):
        whole.record(value)
    later = whole.since(earlier)
    assert (later.count, later.zeros, later.negatives, later.total) == (4, 1, 0, pytest.approx(4.02))
    assert later.quantile(0.5) == pytest.approx(0.01, rel=0.011)
    assert later.quantile(0.25) == 0.0
    assert later.quantile(1.0) == pytest.approx(4.0, rel=0.011)
    assert whole.since(whole).quantile(0.5) is None
