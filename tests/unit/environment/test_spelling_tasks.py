"""The built-in task: splits share no word, pools are the same each time, right answers are worth 1."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import collect_group
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError
from lachesis.testing import FakeInference


def words(**settings) -> list[str]:
    env = SpellBackward(**settings)
    return [str(env.task(index).task["answer"])[::-1] for index in range(len(env))]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.integers(50, 400))
def test_splits_share_no_word_whatever_their_seeds_and_sizes(seeds, size):
    pools = [
        words(split=split, seed=seed, size=size, min_length=3, max_length=5)
        for split, seed in zip(("train", "held_out", "warm_start"), seeds, strict=True)
    ]
    assert len({word for pool in pools for word in pool}) == 3 * size


def test_a_pool_is_the_same_each_time_and_begins_as_a_smaller_one():
    large = words(size=300, seed=2)
    assert words(size=300, seed=2) == large
    assert words(size=40, seed=2) == large[:40]
    assert words(size=40, seed=3) != large[:40]


def test_difficulty_is_the_words_length_within_bounds():
    env = SpellBackward(size=200, min_length=4, max_length=6)
    lengths = {env.task(index).difficulty for index in range(200)}
    assert lengths == {4.0, 5.0, 6.0}
    task = env.task(7)
    assert task.item == f"spell_backward-{task.task['answer'][::-1]}"
    assert str(task.prompt).endswith(task.task["answer"][::-1])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"size": 0}, "size is 0"),
        ({"min_length": 5, "max_length": 4}, "min_length is 5"),
        ({"min_length": 0}, "min_length is 0"),
        ({"min_length": 1, "max_length": 1, "size": 50}, r"found only \d+ words for split 'train'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        SpellBackward(**changes)


async def test_its_own_reward_is_1_for_the_right_answer_alone():
    env = load_environment("spell_backward", {"size": 5, "own_reward": True})
    task = env.task(0)
    right = str(task.task["answer"])
    inference = FakeInference(lambda _, call: right if call % 2 else right + "x")
    draft = await collect_group(env, task, inference, 2, SamplingParams(max_tokens=64))
    assert sorted(value for rewards in draft.rewards for value in rewards.values()) == [0.0, 1.0]
