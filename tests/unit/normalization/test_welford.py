"""The familiar normalizer against a textbook one that recomputes everything from the whole history."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalization.welford import RewardNormalizer
from lachesis.schemas.errors import ConfigError, DataError


def textbook(batches, mode, clip, warmup, eps=1e-8):
    seen, out = [], []
    for batch in batches:
        if not batch:
            out.append([])
            continue
        seen += batch
        if len(seen) < warmup:
            out.append(list(batch))
            continue
        if mode == "zscore":
            mean = math.fsum(seen) / len(seen)
            std = math.sqrt(math.fsum((x - mean) ** 2 for x in seen) / len(seen))
            scaled = [(x - mean) / std if std >= eps else 0.0 for x in batch]
        else:
            low, high = min(seen), max(seen)
            scaled = [(x - low) / (high - low) if high - low >= eps else 0.5 for x in batch]
        out.append(scaled if clip is None else [max(-clip, min(clip, x)) for x in scaled])
    return out


rewards = st.integers(-1000, 1000).map(lambda n: n / 8)  # a spread of exactly 0 or well above rounding


@given(
    st.lists(st.lists(rewards, max_size=6), max_size=8),
    st.sampled_from(["zscore", "minmax"]),
    st.sampled_from([None, 0.5, 5.0]),
    st.integers(0, 12),
)
def test_agrees_with_the_textbook(batches, mode, clip, warmup):
    normalizer = RewardNormalizer(mode, clip, warmup)
    for batch, expected in zip(batches, textbook(batches, mode, clip, warmup), strict=True):
        assert normalizer.normalize(batch) == pytest.approx(expected, abs=1e-9)


def test_the_current_batch_is_in_its_own_statistic():
    normalizer = RewardNormalizer(clip=None, warmup=0)
    normalizer.normalize([0.0] * 25)
    assert normalizer.normalize([1000.0]) == pytest.approx([math.sqrt(25)])


def test_state_round_trip_continues_alike():
    first = RewardNormalizer("minmax", 3.0, 2)
    first.normalize([1.0, 2.0, 5.0])
    second = RewardNormalizer()
    second.load_state_dict(first.state_dict())
    assert second.normalize([3.0]) == first.normalize([3.0]) == [0.5]
    assert second.metrics()["reward_norm/mean"] == statistics.fmean([1.0, 2.0, 5.0, 3.0])


def test_refuses_what_would_poison_it():
    normalizer = RewardNormalizer(warmup=0)
    with pytest.raises(DataError, match="reward 1 is nan"):
        normalizer.normalize([1.0, math.nan])
    assert normalizer.stats.count == 0
    assert normalizer.metrics()["reward_norm/min"] == 0.0
    with pytest.raises(ConfigError, match="Invalid normalization mode"):
        RewardNormalizer("rank")


def test_none_mode_and_clip_off():
    assert RewardNormalizer("none").normalize([7.0]) == [7.0]
    assert RewardNormalizer(clip=-1.0).clip is None
