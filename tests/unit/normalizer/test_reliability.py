"""Reliability weights: residuals and shares by hand, the bound, and copies that cannot take over."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.logic.reliability import MIN_RESIDUAL_VARIANCE, residuals, shares, weighted


def test_a_residual_is_a_rating_less_the_mean_of_the_others():
    found = residuals({"a": [1.0, None, 0.5], "b": [0.0, 0.2, None], "c": [0.5, None, None]})
    assert found == {"a": [0.75, None, None], "b": [-0.75, None, None], "c": [0.0, None, None]}


def test_shares_go_by_one_over_the_variance():
    assert shares({"a": 0.1, "b": 0.2, "c": 0.2}) == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})
    assert shares({"a": 0.1, "b": 0.1, "c": 0.2}) == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.2})
    assert shares({"a": 0.0, "b": MIN_RESIDUAL_VARIANCE, "c": MIN_RESIDUAL_VARIANCE / 2}) == pytest.approx(
        dict.fromkeys("abc", 1 / 3)
    )
    assert shares({"a": 0.0, "b": 0.3, "c": 0.1}) == pytest.approx({"a": 0.5, "b": 0.125, "c": 0.375})


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1), min_size=2, max_size=6))
def test_shares_sum_to_one_and_none_is_above_half(variances):
    found = shares(variances)
    assert math.fsum(found.values()) == pytest.approx(1)
    assert all(0 < share <= 0.5 + 1e-12 for share in found.values())
    for one in variances:
        for other in variances:
            if variances[one] < variances[other]:
                assert found[one] >= found[other] - 1e-12


def test_what_is_missing_is_left_out_of_the_mean():
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    ratings = {"a": [1.0, None], "b": [0.0, 0.0], "c": [0.5, 1.0]}
    assert weighted(ratings, [0.1, 0.1], weights) == pytest.approx([0.6, 0.4])
    assert weighted(ratings, [None, 0.1], weights)[0] is None, "below the quorum stays unscorable"


def test_two_raters_that_copy_each_other_do_not_take_over_from_others_as_good_and_a_noisy_one_fades():
    rng = random.Random(1)
    gold = [rng.random() for _ in range(4000)]
    copied = [g + rng.gauss(0, 0.2) for g in gold]
    ratings = {
        "one": copied, "copy": copied,
        "honest": [g + rng.gauss(0, 0.1) for g in gold], "noisy": [g + rng.gauss(0, 0.6) for g in gold],
    }  # fmt: skip
    found = shares({name: statistics.pvariance(column) for name, column in residuals(ratings).items()})
    assert found["one"] == pytest.approx(found["copy"])
    assert found["one"] + found["copy"] < 0.7
    assert found["noisy"] < 0.1
