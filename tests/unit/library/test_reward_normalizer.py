"""The normalizer of Atropos against an exact one that recomputes everything from the whole history as fractions."""

import json
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import lachesis
from lachesis import RewardNormalizer
from lachesis.pipeline.library.reward_normalizer import WelfordAccumulator
from lachesis.schemas.errors import ConfigError, DataError

EPS = 1e-8


def root(value: Fraction) -> float:
    with localcontext() as context:
        context.prec = 50
        return float((Decimal(value.numerator) / Decimal(value.denominator)).sqrt())


def exact(batches, mode, clip, warmup):
    """What the rule of Atropos gives for batches, with mean, variance and range in exact arithmetic."""
    seen, out = [], []
    for batch in batches:
        if mode == "none":
            out.append(list(batch))
            continue
        seen += map(Fraction, batch)
        scaled = list(batch)
        if batch and len(seen) >= warmup:
            mean = sum(seen) / len(seen)
            std = root(sum((x - mean) ** 2 for x in seen) / len(seen))
            low, extent = min(seen), float(max(seen) - min(seen))
            if mode == "zscore":
                scaled = [float(Fraction(x) - mean) / (std + EPS) if std >= EPS else 0.0 for x in batch]
            else:
                scaled = [float(Fraction(x) - low) / (extent + EPS) if extent >= EPS else 0.5 for x in batch]
        out.append(scaled if not clip or clip < 0 else [max(-clip, min(clip, x)) for x in scaled])
    return out


rewards = st.integers(-1000, 1000).map(lambda n: n / 8)  # a spread of exactly 0 or well above rounding


@given(
    st.lists(st.lists(rewards, max_size=6), max_size=8),
    st.sampled_from(["zscore", "minmax", "none"]),
    st.sampled_from([None, 0, -1.0, 0.5, 5.0]),
    st.integers(-3, 12),
)
@example([[50.0, -50.0], [1.0]], "zscore", 5.0, 10)  # clipped while it warms up
@example([[0.0, 2e-8]], "zscore", None, 0)  # a spread where eps counts
@example([[0.0, 2e-8, 1e-8]], "minmax", None, 0)
def test_agrees_with_exact_arithmetic(batches, mode, clip, warmup):
    normalizer = RewardNormalizer(mode, clip, warmup)
    for batch, expected in zip(batches, exact(batches, mode, clip, warmup), strict=True):
        assert normalizer.normalize(batch) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_long_stream_of_several_scales_agrees_with_exact_arithmetic():
    random = np.random.default_rng(7)
    batches = [(random.normal(size=8) * scale + offset).tolist() for scale, offset in [(1, 0), (5, 3), (0.1, -2)] * 12]
    normalizer = RewardNormalizer(clip=None)
    for batch, expected in zip(batches, exact(batches, "zscore", None, 10), strict=True):
        assert normalizer.normalize(batch) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    seen = [x for batch in batches for x in batch]
    metrics = normalizer.metrics_dict()
    assert metrics == {
        "reward_norm/count": len(seen),
        "reward_norm/mean": pytest.approx(np.mean(seen), rel=1e-12),
        "reward_norm/std": pytest.approx(np.std(seen), rel=1e-12),
        "reward_norm/min": min(seen),
        "reward_norm/max": max(seen),
    }
    assert (normalizer.count, normalizer.mean, normalizer.std) == tuple(metrics.values())[:3]


def test_the_current_batch_is_in_its_own_statistic():
    normalizer = RewardNormalizer(clip=None, warmup=0)
    normalizer.normalize([0.0] * 25)
    assert normalizer.normalize([1000.0]) == pytest.approx([math.sqrt(25)])


def test_warmup_clips_and_is_at_least_0():
    normalizer = RewardNormalizer(warmup=3)
    assert normalizer.normalize([7.0, -9.0]) == [5.0, -5.0]
    assert not normalizer.is_warmed_up
    assert normalizer.mean == -1.0, "the statistics see the rewards unclipped"
    assert RewardNormalizer(warmup=-4).warmup == 0
    assert RewardNormalizer(warmup=-4).is_warmed_up


def test_before_the_first_reward_everything_is_0():
    empty = RewardNormalizer()
    assert set(empty.metrics_dict().values()) == {0.0}
    assert (empty.count, empty.mean, empty.std) == (0, 0.0, 0.0)
    assert (WelfordAccumulator().min_val, WelfordAccumulator().max_val) == (0.0, 0.0)
    assert empty.normalize([]) == []


def test_modes_are_known_by_name_and_others_refused():
    assert {"zscore", "minmax", "none"} == RewardNormalizer.VALID_MODES
    with pytest.raises(ConfigError, match="Invalid normalization mode"):
        RewardNormalizer("rank")
    assert RewardNormalizer("none").normalize([7.0]) == [7.0]
    assert RewardNormalizer(clip=-1.0).clip is RewardNormalizer(clip=0).clip is None


ATROPOS = {
    "mode": "minmax",
    "clip": 3.0,
    "warmup": 2,
    "eps": 1e-6,
    "accumulator": {"count": 3, "mean": 8 / 3, "m2": 26 / 3, "min": 1.0, "max": 5.0},
}


def test_state_round_trip_continues_alike():
    first = RewardNormalizer("minmax", 3.0, 2, 1e-6)
    first.normalize([1.0, 2.0, 5.0])
    state = first.state_dict()
    assert state["accumulator"] == pytest.approx(ATROPOS["accumulator"])
    assert {**state, "accumulator": None} == {**ATROPOS, "accumulator": None}
    for checkpoint in (state, ATROPOS, json.loads(json.dumps(state))):
        second = RewardNormalizer()
        second.load_state_dict(checkpoint)
        assert second.normalize([3.0]) == pytest.approx([2 / (4 + 1e-6)], rel=1e-12)
        assert second.metrics_dict()["reward_norm/mean"] == pytest.approx(11 / 4, rel=1e-12)


def test_checkpoints_of_0_1_load():
    old = {**ATROPOS, "stats": {"count": 3, "mean": 8 / 3, "m2": 26 / 3, "min_val": 1.0, "max_val": 5.0}}
    del old["accumulator"]
    loaded = RewardNormalizer()
    loaded.load_state_dict(old)
    assert loaded.state_dict() == ATROPOS


def test_an_empty_state_comes_back_empty_also_from_strict_json():
    empty = RewardNormalizer(warmup=0)
    assert empty.state_dict()["accumulator"]["min"] == math.inf, "as Atropos writes it"
    for state in (empty.state_dict(), msgspec.json.decode(msgspec.json.encode(empty.state_dict()))):
        loaded = RewardNormalizer("minmax")
        loaded.load_state_dict(state)
        loaded.normalize([-2.0, 4.0])
        assert loaded.metrics_dict()["reward_norm/min"] == -2.0
        assert loaded.metrics_dict()["reward_norm/max"] == 4.0


@pytest.mark.parametrize(
    "changes", [{"mode": "rank"}, {"clip": "5"}, {"accumulator": {"count": 1}}, {"accumulator": None}]
)
def test_a_checkpoint_that_cannot_be_read_changes_nothing(changes):
    normalizer = RewardNormalizer()
    normalizer.normalize([1.0, 2.0])
    before = normalizer.state_dict()
    with pytest.raises((ConfigError, DataError)):
        normalizer.load_state_dict({**ATROPOS, **changes})
    assert normalizer.state_dict() == before


@pytest.mark.parametrize("mode", ["zscore", "minmax"])
@pytest.mark.parametrize("extreme", [[1e308, -1e308], [1.0, 1.1e100], [-1e155]])
def test_a_reward_whose_square_is_no_number_is_refused_and_leaves_no_trace(mode, extreme):
    normalizer, other = RewardNormalizer(mode, warmup=0), RewardNormalizer(mode, warmup=0)
    with pytest.raises(DataError, match=r"reward \d is .*within \+-1e\+100"):
        normalizer.normalize(extreme)
    assert normalizer.normalize([1.0, 2.0, 4.0]) == other.normalize([1.0, 2.0, 4.0])


@pytest.mark.parametrize("magnitude", [1e-100, 1e-6, 1.0, 1e6, 1e100])
@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_every_result_is_finite_over_the_tested_range(magnitude, offset):
    normalizer = RewardNormalizer(warmup=0, clip=None)
    for _ in range(50):
        values = [min(offset + magnitude * x, 1e100) for x in (-1.0, 0.5, 1.0)]
        assert all(math.isfinite(value) for value in normalizer.normalize(values))
    assert math.isfinite(normalizer.std)


@pytest.mark.parametrize(
    "poisoned", [{"mean": math.nan}, {"m2": -1.0}, {"m2": math.inf}, {"count": -1}, {"min": 9.0}, {"mean": 1e300}]
)
def test_a_state_of_no_values_is_refused(poisoned):
    normalizer = RewardNormalizer()
    with pytest.raises(DataError, match="accumulator"):
        normalizer.load_state_dict({**ATROPOS, "accumulator": {**ATROPOS["accumulator"], **poisoned}})
    assert normalizer.count == 0


def test_refuses_what_would_poison_it():
    normalizer = RewardNormalizer(warmup=0)
    with pytest.raises(DataError, match="reward 1 is nan"):
        normalizer.normalize([1.0, math.nan])
    assert normalizer.count == 0
    assert normalizer.metrics_dict()["reward_norm/min"] == 0.0


def test_takes_arrays_too():
    assert RewardNormalizer(warmup=0).normalize(np.array([1, 3])) == RewardNormalizer(warmup=0).normalize([1.0, 3.0])


def test_is_public():
    assert lachesis.RewardNormalizer is RewardNormalizer
