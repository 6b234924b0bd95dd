"""GDPO: several components normalized apart, so that none drowns another; bounds, missing ratings, zero variance."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.schemas.errors import ConfigError, DataError


def compute(components, rewards=None, **config):
    n = len(next(iter(components.values()), []))
    rewards = [float(i) for i in range(n)] if rewards is None else rewards
    return group_advantage(rewards, AdvantageConfig(estimator="gdpo", **config), None, components)


def grpo(values):
    return group_advantage(values, AdvantageConfig(estimator="grpo")).advantages


def test_by_hand():
    correct, form = [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]
    result = compute({"correct": correct, "form": form}, weights={"correct": 2.0, "form": 0.5})
    expected = [2 * a + 0.5 * b for a, b in zip(grpo(correct), grpo(form), strict=True)]
    assert result.advantages == pytest.approx(expected)
    assert result.verdict == "trainable"
    assert (result.mean, result.range, result.n_valid) == (1.5, 3.0, 4)


def test_combinations_of_one_sum_are_told_apart_where_grpo_of_the_sum_cannot():
    correct, form = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    sums = [a + b for a, b in zip(correct, form, strict=True)]
    assert grpo(sums)[0] == grpo(sums)[1]
    apart = compute({"correct": correct, "form": form}, sums).advantages
    assert apart[0] > apart[1], "the rarer success counts for more"


def test_without_weights_every_rater_counts_once_and_with_them_only_those_named():
    components = {"a": [0.0, 1.0, 2.0], "b": [5.0, 0.0, 1.0]}
    both = [x + y for x, y in zip(grpo(components["a"]), grpo(components["b"]), strict=True)]
    assert compute(components).advantages == pytest.approx(both)
    assert compute(components, weights={"a": 1.0}).advantages == grpo(components["a"])


def test_a_sample_that_misses_one_component_or_its_reward_biases_nobody():
    components = {"a": [0.0, 9.0, 1.0, None, 2.0], "b": [1.0, None, 0.0, 4.0, 3.0]}
    result = compute(components, [0.0, 1.0, 2.0, 3.0, None])
    assert result.advantages[1] is result.advantages[3] is result.advantages[4] is None
    alone = compute({"a": [0.0, 1.0], "b": [1.0, 0.0]}, [0.0, 2.0])
    assert (result.advantages[0], result.advantages[2]) == alone.advantages
    assert result.n_valid == 2
    assert compute({"a": [None, 1.0], "b": [1.0, 1.0]}).verdict == "unscorable"


def test_zero_variance_means_that_no_component_differs():
    flat = {"a": [1.0, 1.0], "b": [0.5, 0.5]}
    result = compute(flat, [0.0, 5.0])
    assert result.verdict == "zero_variance"
    assert result.advantages == (0.0, 0.0)
    assert compute(flat | {"b": [0.5, 0.6]}, [3.0, 3.0]).verdict == "trainable", "rewards may be equal in sum"


COLUMN = st.lists(st.floats(-100, 100), min_size=4, max_size=4)


@given(a=COLUMN, b=COLUMN, order=st.permutations(range(4)), w=st.floats(0.1, 10))
def test_sums_bounds_and_permutation(a, b, order, w):
    result = compute({"a": a, "b": b}, weights={"a": w, "b": 1.0})
    assert math.fsum(result.advantages) == pytest.approx(0, abs=1e-9 * (1 + w))
    assert max(map(abs, result.advantages)) <= (w + 1.0) * 3 / 2 * (1 + 1e-9)
    moved = compute(
        {"b": [b[i] for i in order], "a": [a[i] for i in order]},
        [float(i) for i in order],
        weights={"b": 1.0, "a": w},
    )
    assert moved.advantages == tuple(result.advantages[i] for i in order), "to the bit"


@pytest.mark.parametrize("scale", [1e-2, 1e6])
def test_the_scale_of_a_component_does_not_matter(scale):
    components = {"a": [0.0, 1.0, 3.0], "b": [5.0, 0.0, 1.0]}
    scaled = components | {"b": [scale * x for x in components["b"]]}
    assert compute(scaled, std_floor=1e-9).advantages == pytest.approx(compute(components).advantages)


@pytest.mark.parametrize(
    ("components", "weights", "says"),
    [
        ({"a": [0.0, 1.0]}, {"b": 1.0}, r"\['b'\].*those of \['a'\]"),
        ({"a": [0.0, 1.0], "b": [1.0]}, {}, r"\['b'\] for each of 2"),
        ({}, {}, "one rater at least"),
    ],
)  # fmt: skip
def test_an_unknown_rater_and_a_wrong_length_are_refused(components, weights, says):
    with pytest.raises(DataError, match=says):
        compute(components, [0.0, 1.0], weights=weights)


def test_wrong_weights_name_themselves():
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"advantage\.weights\.a"):
            AdvantageConfig(estimator="gdpo", weights={"a": weight})
    with pytest.raises(ConfigError, match="for estimator gdpo"):
        AdvantageConfig(estimator="grpo", weights={"a": 1.0})
