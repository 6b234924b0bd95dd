"""The choice of held-out tasks: the same everywhere, nested, and never drawn."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.tasks.held_out import ANY_RANK, MIN_HELD_OUT_TASKS, choose_held_out, mask_held_out
from lachesis.pipeline.tasks.item_keys import mixed

pytestmark = pytest.mark.outside


def keys_of_pool(size, pool=0):
    return mixed(np.arange(size, dtype=np.uint64) + np.uint64(pool << 32))


def chosen(seed=0, size=1000, share=0.1, most=200):
    return choose_held_out(keys_of_pool(size), seed, share=share, most=most).tasks.tolist()


def test_the_choice_is_written_down():
    """A restart, another process and a later version hold out these tasks: a run that others trained would leak."""
    assert chosen(size=100) == [71, 30, 94, 41, 31, 6, 21, 27, 47, 60]
    code = (
        "import numpy as n;from lachesis.pipeline.tasks.item_keys import mixed as m;"
        "from lachesis.pipeline.tasks.held_out import choose_held_out as c;"
        "print(c(m(n.arange(100, dtype=n.uint64)), 0, share=.1, most=200).tasks.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(chosen(size=100))


@given(st.integers(0, 2**63), st.integers(1, 3000), st.floats(0.01, 0.5), st.integers(1, 400))
def test_it_has_its_share_of_different_tasks_and_no_more(seed, size, share, most):
    tasks = chosen(seed, size, share, most)
    assert len(set(tasks)) == len(tasks) <= min(size * share + 1e-6, most)
    assert not tasks or len(tasks) >= MIN_HELD_OUT_TASKS
    assert all(0 <= task < size for task in tasks)


def test_seed_and_tasks_decide_and_a_smaller_share_is_the_beginning_of_a_larger():
    assert chosen(0) != chosen(1)
    assert chosen(share=0.05) == chosen(share=0.2)[:50]
    assert chosen(most=30) == chosen()[:30]


@pytest.mark.parametrize(("size", "held_out"), [(79, 0), (80, 8), (90, 9), (10_000, 200)])
def test_a_small_pool_is_trained_on_whole_and_a_large_one_gives_no_more_than_are_evaluated(size, held_out):
    assert len(chosen(size=size)) == held_out


keys_strategy = st.lists(st.integers(0, 400), min_size=1, max_size=400)


@given(st.lists(st.tuples(keys_strategy, st.floats(0.0, 0.5), st.integers(1, 50), st.integers(0, 3)), max_size=6))
def test_what_was_ever_drawn_is_never_held_out_whatever_the_pool_becomes(starts):
    limit, drawn = ANY_RANK, set()
    for names, share, most, _ in starts:
        pool = mixed(np.array(names, np.uint64))
        split = choose_held_out(pool, 7, share=share, most=most, limit=limit)
        again = choose_held_out(pool, 7, share=share, most=most, limit=min(limit, split.limit))
        assert again.tasks.tolist() == split.tasks.tolist(), "whoever reads the record later chooses the same"
        held_out = {names[task] for task in split.tasks}
        assert held_out.isdisjoint(drawn)
        drawn |= {name for place, name in enumerate(names) if place not in set(split.tasks.tolist())}
        assert held_out.isdisjoint(drawn), "tasks of one key are on one side"
        limit = min(limit, split.limit)


def test_a_shuffled_pool_holds_out_the_same_tasks():
    keys, order = keys_of_pool(120), np.random.default_rng(0).permutation(120)
    one, other = (choose_held_out(k, 0, share=0.1, most=200).tasks for k in (keys, keys[order]))
    assert keys[one].tolist() == keys[order][other].tolist()
    assert len(one) == 12


def test_a_pool_that_grew_says_how_many_it_cannot_hold_out():
    first = choose_held_out(keys_of_pool(120), 0, share=0.1, most=200)
    grown = choose_held_out(keys_of_pool(1000), 0, share=0.1, most=200, limit=first.limit)
    assert len(grown.tasks) + grown.withheld == 100
    whole = choose_held_out(keys_of_pool(120), 0, share=0.0, most=200)
    assert choose_held_out(keys_of_pool(120), 0, share=0.1, most=200, limit=whole.limit).withheld == 12


def test_nothing_is_held_out_by_a_share_of_zero():
    assert chosen(share=0.0) == []


def test_weights_of_held_out_tasks_are_zero():
    weights = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    assert mask_held_out(weights, np.array([1, 3])).tolist() == [1.0, 0.0, 3.0, 0.0]
    assert weights.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert mask_held_out(weights, np.array([], np.int64)).tolist() == weights.tolist()


def test_a_curriculum_that_wants_held_out_tasks_alone_gets_all_others():
    weights = np.array([0.0, 5.0, 0.0], np.float32)
    assert mask_held_out(weights, np.array([1])).tolist() == [1.0, 0.0, 1.0]
