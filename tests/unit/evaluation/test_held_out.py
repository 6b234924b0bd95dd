"""The choice of held-out tasks: the same everywhere, nested, and never drawn."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.evaluation.logic.held_out import MIN_HELD_OUT_TASKS, choose_held_out, mask_held_out


def chosen(seed=0, env="sums", size=1000, share=0.1, most=200):
    return choose_held_out(seed, env, size, share=share, most=most).tolist()


def test_the_choice_is_written_down():
    """A restart, another process and a later version hold out these tasks: a run that others trained would leak."""
    assert chosen(size=100) == [99, 80, 42, 62, 36, 53, 12, 48, 54, 93]
    code = (
        "from lachesis.pipeline.evaluation.logic.held_out import choose_held_out as c;"
        "print(c(0, 'sums', 100, share=.1, most=200).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(chosen(size=100))


@given(st.integers(0, 2**63), st.integers(1, 3000), st.floats(0.01, 0.5), st.integers(1, 400))
def test_it_has_its_share_of_different_tasks_and_no_more(seed, size, share, most):
    tasks = chosen(seed, "e", size, share, most)
    assert len(set(tasks)) == len(tasks) <= min(size * share + 1e-6, most)
    assert not tasks or len(tasks) >= MIN_HELD_OUT_TASKS
    assert all(0 <= task < size for task in tasks)


def test_seed_environment_and_pool_decide_and_a_smaller_share_is_the_beginning_of_a_larger():
    assert len({tuple(chosen(*args)) for args in [(0, "a", 1000), (1, "a", 1000), (0, "b", 1000), (0, "a", 1001)]}) == 4
    assert chosen(share=0.05) == chosen(share=0.2)[:50]
    assert chosen(most=30) == chosen()[:30]


@pytest.mark.parametrize(("size", "held_out"), [(79, 0), (80, 8), (90, 9), (10_000, 200)])
def test_a_small_pool_is_trained_on_whole_and_a_large_one_gives_no_more_than_are_evaluated(size, held_out):
    assert len(chosen(size=size)) == held_out


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
