"""Snapshots: modes, warm-up, clip around the mean, ids that follow the content."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.accumulator import MomentAccumulator, Moments, decay_weights, fold
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.schemas.errors import ConfigError


def snapshot(mean=10.0, std=2.0, count=100, groups=10, **config):
    stats = Moments(count=count, groups=groups, mean=mean, std=std, low=0, high=20)
    return NormalizationSnapshot.build("e", 3, NormalizationConfig(**config), {"r": stats})


def test_scale_divides_and_keeps_the_centre():
    assert snapshot().normalize("r", [10.0, None, 12.0]) == [5.0, None, 6.0]


def test_zscore_subtracts_the_mean():
    assert snapshot(mode="zscore").normalize("r", [10.0, 12.0]) == [0.0, 1.0]


def test_the_clip_is_around_the_mean_so_a_far_mean_does_not_flatten_a_group():
    result = snapshot(mean=1000.0).normalize("r", [1000.0, 1002.0, 5000.0])
    assert result == [500.0, 501.0, 505.0]
    assert snapshot(mean=1000.0, clip=None).normalize("r", [5000.0]) == [2500.0]
    assert snapshot(mean=1000.0, clip=0).normalize("r", [5000.0]) == [2500.0]


def test_a_constant_reward_uses_the_floor():
    assert snapshot(mean=1.0, std=0.0, mode="zscore").normalize("r", [1.0, 1.001, 2.0]) == pytest.approx(
        [0.0, 1.0, 5.0]
    )


@pytest.mark.parametrize("short", [{"count": 63}, {"groups": 7}])
def test_warm_up_passes_unchanged_and_says_so(short):
    cold = snapshot(**short)
    assert not cold.warm("r")
    assert cold.normalize("r", [1e6, None]) == [1e6, None]
    assert not snapshot().warm("unheard of")


def test_minmax_maps_declared_bounds_and_clips_what_lies_outside():
    result = snapshot(mode="minmax", bounds={"r": (-1.0, 3.0)}).normalize("r", [-1.0, 1.0, 7.0])
    assert result == [0.0, 0.5, 1.0]


def test_none_leaves_rewards_alone():
    assert snapshot(mode="none").normalize("r", [1e9]) == [1e9]


def test_ids_follow_the_content():
    assert snapshot().id == snapshot().id
    assert len({snapshot(**change).id for change in ({}, {"mean": 1.0}, {"clip": 4.0}, {"mode": "zscore"})}) == 4


@pytest.mark.parametrize(
    "wrong",
    [{"window": 0}, {"decay": 0.0}, {"decay": 1.1}, {"std_floor": 0.0}, {"clip": -1.0},
     {"bounds": {"r": (1.0, 1.0)}, "mode": "minmax"}, {"bounds": {"r": (0.0, 1.0)}},
     {"history": 0}, {"warmup_groups": -1}, {"clip": float("nan")}],
)  # fmt: skip
def test_wrong_settings_name_themselves(wrong):
    with pytest.raises(ConfigError, match=r"normalization\." + next(iter(wrong))):
        NormalizationConfig(**wrong)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_moments_agree_with_the_textbook(values):
    acc = MomentAccumulator()
    for value in values:
        acc.add_group([value, None])
    moments = fold([(1 << 32, acc)])
    assert moments.count == moments.groups == len(values)
    assert moments.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert moments.std == pytest.approx(statistics.pstdev(values), rel=1e-9, abs=1e-4)
    assert moments.low == pytest.approx(min(values), abs=1e-9)


def test_variance_survives_an_offset_of_a_billion():
    rng = random.Random(0)
    noise = [rng.gauss(0, 1) for _ in range(20_000)]
    acc = MomentAccumulator()
    acc.add_group([1e9 + x for x in noise])
    held = [(1e9 + x) - 1e9 for x in noise]
    assert fold([(1 << 32, acc)]).std ** 2 == pytest.approx(statistics.pvariance(held), rel=1e-12)


@given(st.randoms(use_true_random=False), st.lists(st.lists(st.floats(-1e9, 1e9), max_size=4), max_size=20))
def test_sums_do_not_depend_on_order_or_sharding(rng, columns):
    whole = MomentAccumulator()
    for column in columns:
        whole.add_group(column)
    shuffled = rng.sample(columns, len(columns))
    cut = rng.randint(0, len(columns))
    parts = [MomentAccumulator(), MomentAccumulator()]
    for i, column in enumerate(shuffled):
        parts[i < cut].add_group(column)
    parts[0].merge(parts[1])
    assert parts[0] == whole
    assert MomentAccumulator.from_list(whole.to_list()) == whole


def test_weights_decay_geometrically():
    weights = decay_weights(0.99, 256)
    assert weights[0] == 1 << 32
    assert weights[255] / 2**32 == pytest.approx(0.99**255, rel=1e-6)


def test_nothing_folds_to_nothing():
    assert fold([]) is None
    assert fold([(1 << 32, MomentAccumulator())]) is None
