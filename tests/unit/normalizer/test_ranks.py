"""Ranks against the sorted values, bounded cells, one result for any sharding, and states that cannot be."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic import ranks as ranks_module
from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.normalizer.logic.ranks import MAX_CELLS, MAX_SHIFT, RankCounts, RankTable
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.schemas.errors import SchemaError

ONE = 1 << 32
VALUES = st.floats(-MAX_ABS_VALUE, MAX_ABS_VALUE) | st.floats(-2, 2) | st.integers(-3, 3).map(float)


def counted(*columns):
    counts = RankCounts()
    for column in columns:
        counts.add_group(column)
    return counts


def table(*columns):
    return RankTable.of([(ONE, counted(*columns))])


def mid_rank(values, x):
    return (sum(v < x for v in values) + sum(v == x for v in values) / 2) / len(values)


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=120), st.integers(-60, 60))
def test_few_different_values_have_their_textbook_mid_rank(values, x):
    assert table([v / 4 for v in values]).rank(x / 4) == pytest.approx(mid_rank(values, x), abs=1e-15)


def test_by_hand():
    made = table([0.0, 1.0, None], [1.0, 5.0], [None])
    assert [made.rank(x) for x in (-1.0, 0.0, 0.5, 1.0, 2.0, 5.0, 9.0)] == [0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0]
    assert (made.count, made.groups) == (4, 2)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_many_values_are_ranked_to_a_cell_and_one_outlier_costs_no_resolution(scale):
    rng = random.Random(1)
    values = [rng.gauss(5, 1) * scale for _ in range(4000)]
    made = table(values, [MAX_ABS_VALUE, -MAX_ABS_VALUE])
    off = max(abs(made.rank(x) - mid_rank(values, x)) for x in rng.sample(values, 200))
    assert off < 0.03
    assert len(made.edges) <= MAX_CELLS


@given(st.lists(VALUES, min_size=1, max_size=600), VALUES, VALUES)
def test_cells_are_bounded_and_ranks_monotone(values, x, y):
    counts = counted(values)
    assert len(counts.cells) <= MAX_CELLS
    assert counts.shift <= MAX_SHIFT
    assert sum(counts.cells.values()) == len(values)
    made = RankTable.of([(ONE, counts)])
    low, high = sorted((x, y))
    assert 0 <= made.rank(low) <= made.rank(high) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 5])
@given(columns=st.lists(st.lists(VALUES | st.none(), min_size=1, max_size=40), max_size=40), rng=st.randoms())
def test_the_same_bits_for_any_order_and_number_of_replicas(replicas, columns, rng):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks_module, "MAX_CELLS", 8)  # so that cells are merged all the time
        expected = counted(*columns)
        shuffled = rng.sample(columns, len(columns))
        parts = [counted(*shuffled[i::replicas]) for i in range(replicas)]
        rng.shuffle(parts)
        merged = RankCounts()
        for part in parts:
            merged.merge(RankCounts.from_list(part.to_list()))
    assert len(merged.cells) <= 8
    assert merged.to_list() == expected.to_list()


def test_windows_of_different_resolution_fold_to_the_coarser_one():
    fine, coarse = counted([0.0, 1.0]), counted([i / 1000 for i in range(1000)])
    made = RankTable.of([(ONE, fine), (ONE, coarse)])
    assert (made.shift, made.count, made.groups) == (coarse.shift, 1002, 2)
    assert made.rank(0.5) == pytest.approx(0.5, abs=0.01)
    assert made == RankTable.of([(ONE, coarse), (ONE, fine)])


def test_older_windows_weigh_less():
    made = RankTable.of([(ONE, counted([0.0])), (ONE // 2, counted([2.0]))])
    assert made.rank(1.0) == pytest.approx(2 / 3)
    assert RankTable.of([(ONE // 2, counted([2.0])), (ONE, counted([0.0]))]) == made


def test_an_empty_table_ranks_nothing():
    with pytest.raises(ValueError, match="ranks nothing"):
        RankTable.of([]).rank(0.0)


def test_a_snapshot_with_ranks_survives_encoding_and_its_id_follows_them():
    config = NormalizationConfig(mode="rank", warmup_samples=4, warmup_groups=2)

    def snapshot(*columns):
        return NormalizationSnapshot.build("e", 1, config, {}, {"r": table(*columns)})

    made = snapshot([0.0, 1.0], [1.0, 3.0])
    assert made.normalize("r", [1.0, None]) == [0.5, None]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=NormalizationSnapshot) == made
    assert made.id != snapshot([0.0, 1.0], [1.0, 2.0]).id
    cold = snapshot([0.0, 1.0, 2.0, 3.0])
    assert (cold.normalize("r", [7.0]), cold.warm("r")) == ([7.0], False), "one group is fewer than two"


def test_the_order_of_rewards_is_kept_whatever_their_scale():
    config = NormalizationConfig(mode="rank", window=4, warmup_samples=4, warmup_groups=2)
    for scale in (1e-3, 1.0, 1e6):
        norm = EnvNormalizer("e", config)
        for seq in range(1, 41):
            norm.member(seq, f"g{seq}")
            norm.resolve(f"g{seq}", seq, {"score": [scale * x for x in (0.0, 1.0, 1.0, 4.0)]})
            ready = norm.step().ready
        assert ready[-1].snapshot.normalize("score", [0.0, scale, 4 * scale]) == [0.125, 0.5, 0.875]


STATE = EnvNormalizer("e", NormalizationConfig(mode="rank")).state_dict() | {"base": 3, "watermark": 200}


@pytest.mark.parametrize(
    "counts",
    [
        (0, 1, "1:1 1:1"),  # one cell twice
        (0, 1, "1:0"),  # nothing in it
        (0, 2, "1:1"),  # more groups than values
        (0, 0, "1:1"),  # values of no group
        (74, 1, "1:1"),
        (0, 1, " ".join(f"{i:x}:1" for i in range(MAX_CELLS + 1))),
        (73, 1, "f:1"),  # beyond any reward
        (0, 1, "1:1 "),
        (0, 1, "1"),
        (-1, 1, "1:1"),
    ],
)
def test_ranks_that_cannot_be_are_refused(counts):
    norm = EnvNormalizer("e", NormalizationConfig(mode="rank"))
    with pytest.raises(SchemaError):
        norm.load_state_dict(STATE | {"ranks": {"1": {"r": counts}}})
    norm.load_state_dict(STATE | {"ranks": {"1": {"r": (0, 1, "-a:1 1:2")}}})
