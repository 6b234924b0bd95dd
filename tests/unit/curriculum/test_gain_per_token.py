"""The strategy gain_per_token: the price of an item, repeats, copies, what was not met yet."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.learner import PoolLearner
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.curriculum.stage import items_of
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas.errors import ConfigError, DataError


def make(items, **config):
    return load_strategy(items, CurriculumConfig(strategy="gain_per_token", **{"explore": 0.0} | config))


def result(i, item, success, *, tokens=None, n=8, step=0):
    return ItemFeedback(
        id=f"{i}", env="e", item=item, skill=None, n=n, success=success, policy_step=step, tokens=tokens
    )


def test_of_items_solved_alike_the_shorter_is_drawn_more():
    strategy = make(ItemPool(2))
    strategy.observe(result(0, 0, 0.5, tokens=100.0))
    strategy.observe(result(1, 1, 0.5, tokens=200.0))
    weights = strategy.weights()
    assert weights[0] > 50 * weights[1], "twice the price, to the power 8"
    without = make(ItemPool(2))
    for i in range(2):
        without.observe(result(i, i, 0.5))
    assert without.weights()[0] == pytest.approx(without.weights()[1], rel=0.2)


def test_items_that_were_not_met_have_equal_weights_and_come_before_the_others():
    strategy = make(ItemPool(20))
    for i in range(10):
        strategy.observe(result(i, i, 0.5, tokens=100.0))
    weights = strategy.weights()
    assert len(set(weights[10:].tolist())) == 1
    assert (weights[:10] < 0.1 * weights[10]).all()


def test_repeats_are_drawn_as_if_they_taught_as_much_where_the_configuration_says_so():
    strategy = make(ItemPool(20), repeat_worth=1.0)
    for i in range(10):
        strategy.observe(result(i, i, 0.5 if i < 5 else float(i % 2), tokens=100.0))
    weights = strategy.weights()
    assert (weights[:5] > weights[10]).all(), "known to be half solved: worth more than the mean of what is not known"
    assert (weights[5:10] < 0.1 * weights[10]).all()


def test_what_was_met_while_all_answers_were_short_is_not_taken_for_cheap_later():
    """Each item is met twice, all cost the same at a time, and answers grow from 100 to 1,600 tokens."""
    strategy = make(ItemPool(400))
    for i in range(800):
        strategy.observe(result(i, i // 2, 0.5, tokens=100.0 * 16 ** (i / 800)))
    price = strategy.arrays()["price"]
    assert abs(price[:100].mean() - price[300:].mean()) < 0.5, "logarithms: answers grew by 2.8"


def test_the_price_of_an_item_that_was_not_met_is_predicted_from_its_difficulty():
    """Harder tasks cost more: of two that were not met, as far from even odds, the easier one is worth more."""
    difficulty = np.append(np.linspace(-2.0, 2.0, 100), [-1.0, 1.0])
    drawn = {}
    for slope in (0.0, 0.5):
        strategy = make(ItemPool(102, difficulty), ability_rate=1e-9)
        for i in range(100):
            strategy.observe(result(i, i, 0.5, tokens=200.0 * np.exp(slope * difficulty[i])))
        drawn[slope] = strategy.weights()[100:]
    assert drawn[0.0][0] == pytest.approx(drawn[0.0][1], rel=0.05)
    assert drawn[0.5][0] > 5 * drawn[0.5][1]


COPIES = np.array([7, 8, 7, 9, 7], np.uint64)


def test_one_of_the_items_of_one_content_is_drawn_and_has_the_results_of_all():
    strategy, alone = (make(ItemPool(5, contents=one), explore=0.1) for one in (COPIES, None))
    for i, item in enumerate([2, 4, 0, 1]):
        strategy.observe(result(i, item, 0.5, tokens=100.0))
        alone.observe(result(i, 0 if item != 1 else 1, 0.5, tokens=100.0))
    weights = strategy.snapshot().weights
    assert weights[[2, 4]].tolist() == [0.0, 0.0]
    assert (weights[[0, 1, 3]] > 0).all()
    assert strategy.arrays()["met"].tolist() == [3, 1, 0, 0, 0] == alone.arrays()["met"].tolist()
    assert strategy.arrays()["difficulty"].tolist() == alone.arrays()["difficulty"].tolist()


def test_a_held_out_item_stands_for_no_other():
    strategy = make(ItemPool(5, contents=COPIES, held_out=np.array([0])))
    assert np.flatnonzero(strategy.snapshot().weights).tolist() == [1, 2, 3]


def test_what_is_known_of_copies_goes_with_them_into_another_order():
    keys = np.array([50, 20, 10, 30, 40], np.uint64)

    def learner(order):
        pool = ItemPool(5, contents=COPIES[order], keys=keys[order])
        return PoolLearner("e", pool, CurriculumConfig(strategy="gain_per_token"))

    first, second = learner([0, 1, 2, 3, 4]), learner([4, 3, 2, 1, 0])
    for i in range(3):
        first.observe(result(i, 0, 0.25), "x")
    second.load_state(first.state())
    before, after = first.weights().weights, second.weights().weights
    np.testing.assert_array_equal(after, before[::-1])
    assert before[2] > 0 == before[0] == before[4]


class Pool(Environment):
    """Tasks that ask the same, in one case with the same data for raters."""

    tasks = (
        Task(item="a", prompt="1 + 1", task={"answer": "2"}),
        Task(item="b", prompt="1  + 1 ", task={"answer": "2"}),
        Task(item="c", prompt="1 + 1", task={"answer": "10"}),
        Task(item="d", prompt="1 + 1", task={"answer": "2"}, skill="other"),
        Task(item="e", prompt="1 + 2", task={"answer": "2"}),
    )

    def __len__(self):
        return 5

    def task(self, index):
        return self.tasks[index]


def test_tasks_are_copies_if_they_ask_the_same_and_are_judged_by_the_same_data():
    contents = items_of(Pool()).contents.tolist()
    assert contents[0] == contents[1]
    assert len({*contents}) == 4


@pytest.mark.parametrize("tokens", [-1.0, float("nan"), float("inf"), "many"])
def test_tokens_that_cannot_be_are_refused(tokens):
    strategy = make(ItemPool(2))
    before = strategy.state_dict()
    with pytest.raises(DataError, match=r"feedback 0: .*tokens"):
        strategy.observe(result(0, 0, 0.5, tokens=tokens))
    assert strategy.state_dict() == before


@pytest.mark.parametrize("worth", [0.0, 1.1, float("nan")])
def test_a_worth_of_repeats_that_cannot_be_is_refused(worth):
    with pytest.raises(ConfigError, match=r"curriculum\.repeat_worth is .*; it must lie between"):
        CurriculumConfig(repeat_worth=worth)


groups = st.tuples(
    st.integers(0, 2), st.floats(0, 1), st.integers(1, 1 << 40), st.none() | st.floats(0, 1e300), st.integers(0, 40)
)


@given(st.lists(groups, max_size=40), st.sampled_from([0.001, 0.5, 1.0]))
def test_weights_stay_fit_to_draw_from_and_states_to_store_whatever_the_results(results, worth):
    strategy, again = (make(ItemPool(3), repeat_worth=worth) for _ in range(2))
    for i, (item, success, n, tokens, step) in enumerate(results):
        strategy.observe(result(i, item, success, tokens=tokens, n=n, step=step))
    again.load_state_dict(strategy.state_dict())
    assert np.isfinite(strategy.snapshot().weights).all()
    assert again.snapshot().id == strategy.snapshot().id
