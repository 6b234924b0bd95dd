import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.batcher import batch_choice as select_module
from lachesis.pipeline.batcher.batch_choice import choose_batch, precedence
from lachesis.schemas.ledger import GroupRef


def ref(seq: int, sequences: int, tokens: int = 10, env: str = "a") -> GroupRef:
    return GroupRef(
        group=f"{seq:032x}",
        seq=seq,
        env=env,
        sequences=sequences,
        tokens=tokens,
        policy_step=0,
        advantages=[1.0],
    )


def seqs(chosen: list[GroupRef] | None) -> list[int] | None:
    return None if chosen is None else [group.seq for group in chosen]


def brute_force(
    groups: list[GroupRef], batch_size: int, budget: int | None, mix: dict[str, float], *, incomplete: bool
) -> list[int] | None:
    ordered = [groups[i] for i in precedence(groups, mix)]
    best: tuple[int, list[int]] | None = None
    for n in range(1, len(ordered) + 1):
        for combination in itertools.combinations(range(len(ordered)), n):
            sequences = sum(ordered[i].sequences for i in combination)
            if sequences > batch_size or (sequences < batch_size and not incomplete):
                continue
            if budget is not None and sum(ordered[i].tokens for i in combination) > budget:
                continue
            picked = list(combination)
            # more sequences first, then the earliest: a longer list of equal beginning cannot have as many sequences
            if best is None or sequences > best[0] or (sequences == best[0] and picked < best[1]):
                best = (sequences, picked)
    return None if best is None else [ordered[i].seq for i in best[1]]


@pytest.mark.slow
@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20), st.sampled_from("abc")), max_size=8),
    st.integers(1, 16),
    st.one_of(st.none(), st.integers(1, 60)),
    st.sampled_from([{}, {"a": 1.0}, {"a": 0.2, "b": 5.0}]),
    st.booleans(),
)
def test_select_equals_brute_force(shapes, batch_size, budget, mix, incomplete) -> None:  # type: ignore[no-untyped-def]
    groups = [
        ref(i + 1, sequences, tokens, env)
        for i, (sequences, tokens, env) in enumerate(shapes)
        if sequences <= batch_size and (budget is None or tokens <= budget)
    ]
    chosen = choose_batch(groups, batch_size, token_budget=budget, mix=mix, incomplete=incomplete)
    assert seqs(chosen) == brute_force(groups, batch_size, budget, mix, incomplete=incomplete)
    shuffled = random.Random(1).sample(groups, len(groups))
    assert seqs(choose_batch(shuffled, batch_size, token_budget=budget, mix=mix, incomplete=incomplete)) == seqs(chosen)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), max_size=14), st.integers(1, 24), st.integers(9, 80))
def test_thinning_finds_a_choice_where_there_is_one(shapes, batch_size, budget) -> None:  # type: ignore[no-untyped-def]
    groups = [ref(i + 1, size, tokens) for i, (size, tokens) in enumerate(shapes) if size <= batch_size]
    whole = choose_batch(groups, batch_size, token_budget=budget)
    for by_tokens in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(select_module, "_MAX_GROUPS_WEIGHED", 0)
            kept = select_module._thin(groups, batch_size, by_tokens=by_tokens)
        if by_tokens:
            thinned = choose_batch(kept, batch_size, token_budget=budget)
            assert (thinned is None) == (whole is None)
        else:
            assert seqs(choose_batch(kept, batch_size)) == seqs(choose_batch(groups, batch_size))


def test_no_group_blocks_those_behind_it() -> None:
    groups = [ref(1, 3), ref(2, 3), ref(3, 3), ref(4, 5)]
    assert seqs(choose_batch(groups, 8)) == [1, 4]
    assert choose_batch(groups[:3], 8) is None
    assert seqs(choose_batch(groups[:3], 8, incomplete=True)) == [1, 2]


def test_the_oldest_go_first_and_a_dear_one_waits() -> None:
    assert seqs(choose_batch([ref(i, 4) for i in (9, 3, 5, 1)], 8)) == [1, 3]
    groups = [ref(1, 4, tokens=90), ref(2, 4, tokens=60), ref(3, 4, tokens=10)]
    assert seqs(choose_batch(groups, 8, token_budget=100)) == [1, 3]
    assert choose_batch(groups[:2], 8, token_budget=100) is None
    assert seqs(choose_batch(groups[:2], 8, token_budget=100, incomplete=True)) == [1]


def test_nothing_to_choose_from() -> None:
    assert choose_batch([], 8) is None
    assert choose_batch([], 8, incomplete=True) is None


def test_shares_hold_and_a_silent_environment_blocks_nothing() -> None:
    groups = [ref(i, 4, env="fast") for i in range(1, 41)] + [ref(100 + i, 4, env="slow") for i in range(40)]
    chosen = choose_batch(groups, 64, mix={"fast": 3.0, "slow": 1.0, "silent": 12.0})
    assert chosen is not None
    assert sum(group.sequences for group in chosen if group.env == "fast") == 48
    assert sum(group.sequences for group in chosen if group.env == "slow") == 16
    alone = choose_batch(groups[:16], 64, mix={"fast": 1.0, "silent": 9.0})
    assert seqs(alone) == list(range(1, 17))


@pytest.mark.slow
def test_one_group_that_fits_is_found_among_thousands_that_do_not() -> None:
    sizes = [random.Random(7).choice([6, 9, 12, 15]) for _ in range(20_000)]
    groups = [ref(i + 1, size, tokens=size * 7) for i, size in enumerate(sizes)]
    assert choose_batch(groups, 1024, token_budget=100_000) is None  # all multiples of 3
    chosen = choose_batch([*groups, ref(99_999, 4, tokens=9)], 1024, token_budget=100_000)
    assert chosen is not None
    assert sum(group.sequences for group in chosen) == 1024
    assert chosen[-1].seq == 99_999


def test_a_batch_of_more_groups_than_are_weighed_at_once() -> None:
    assert seqs(choose_batch([ref(i, 4) for i in range(1, 6001)], 16_384)) == list(range(1, 4097))
    mixed = [ref(i, 3 + 2 * (i % 2)) for i in range(1, 6001)]
    chosen = choose_batch(mixed, 16_384)
    assert chosen is not None
    assert sum(group.sequences for group in chosen) == 16_384
