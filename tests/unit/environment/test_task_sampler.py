"""Drawing items: by weight, without replacement, deterministic, cheap."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.environment.task_sampler import ItemWeights, TaskSampler
from lachesis.schemas.errors import DataError

weights = st.lists(st.floats(0, 1000, width=32, allow_subnormal=False), min_size=1, max_size=30).filter(any)


@given(weights, st.integers(0, 70), st.integers(0, 2**32))
def test_no_item_repeats_before_all_with_a_weight_came(values, n, seed):
    sampler = TaskSampler.from_snapshot(np.array(values))
    draws = sampler.sample(n, np.random.default_rng(seed))
    assert draws == sampler.sample(n, np.random.default_rng(seed))
    assert len(draws) == n
    support = sum(v > 0 for v in values)
    for start in range(0, n, support):
        part = [draw.item for draw in draws[start : start + support]]
        assert len(set(part)) == len(part)
    for draw in draws:
        assert values[draw.item] > 0
        assert draw.probability == pytest.approx(values[draw.item] / sum(values), rel=1e-5)


def test_first_draws_follow_the_weights():
    sampler = TaskSampler.from_snapshot(np.array([1.0, 2.0, 0.0, 5.0]))
    rng = np.random.default_rng(0)
    counts = np.bincount([sampler.sample(1, rng)[0].item for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx([0.125, 0.25, 0, 0.625], abs=0.015)


@given(weights, st.integers(1, 60), st.integers(0, 2**32))
def test_what_was_drawn_recently_comes_again_only_after_half_of_the_others(values, n, seed):
    sampler, rng = TaskSampler.from_snapshot(np.array(values)), np.random.default_rng(seed)
    drawn = []
    for _ in range(n):
        drawn.append(sampler.sample(1, rng, recent=drawn)[0].item)
    apart = sum(v > 0 for v in values) // 2 + 1
    for start in range(n):
        part = drawn[start : start + apart]
        assert len(set(part)) == len(part)


def test_recent_items_do_not_count_where_they_are_few():
    sampler = TaskSampler.from_snapshot(np.array([1e6, 1.0, 1.0, 1.0, 1.0, 0.0]))
    draws = [sampler.sample(1, np.random.default_rng(seed), recent=[0, 5])[0].item for seed in range(50)]
    assert set(draws) == {1, 2, 3, 4}
    everything = sampler.sample(5, np.random.default_rng(0), recent=[0])
    assert sorted(one.item for one in everything) == [0, 1, 2, 3, 4]
    assert everything[-1].item == 0


@pytest.mark.slow
@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0], [1e6, 1.0, 2.0, 3.0]])
def test_pairs_follow_successive_sampling_with_and_without_the_fallback(values):
    """P(j second) = sum_i p_i p_j / (1 - p_i); the second case almost always needs the fallback."""
    p = np.array(values) / sum(values)
    expected = [sum(p[i] * p[j] / (1 - p[i]) for i in range(4) if i != j) for j in range(4)]
    sampler = TaskSampler.from_snapshot(np.array(values))
    rng = np.random.default_rng(1)
    counts = np.bincount([sampler.sample(2, rng)[1].item for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("bad", [[], [[1.0]], [0.0, 0.0], [1.0, -1.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_bad_weights_are_refused(bad):
    with pytest.raises(DataError, match="curriculum weights"):
        TaskSampler.from_snapshot(np.array(bad))


def test_ids_follow_content_and_observations_and_weights_are_read_only():
    first = ItemWeights.of(np.ones(3, np.float32), 7)
    assert first.id == ItemWeights.of(np.ones(3, np.float32), 7).id
    assert first.id != ItemWeights.of(np.ones(4, np.float32), 7).id
    assert first.id != ItemWeights.of(np.ones(3, np.float32), 8).id
    with pytest.raises(ValueError, match="read-only"):
        first.weights[0] = 2.0
