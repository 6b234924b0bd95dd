"""Difficulties predicted from prompts: the features, the regression, its state, what irt makes of it."""

import math

import msgspec
import numpy as np
import pytest

from lachesis import Environment, Task
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.features import FEATURES as FEATURE_NAMES
from lachesis.pipeline.curriculum.logic.features import DifficultyPredictor, prompt_features
from lachesis.pipeline.curriculum.logic.irt import OnlineIRT
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.curriculum.stage import items_of
from lachesis.schemas.errors import ConfigError, SchemaError

rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(400, 6)).astype(np.float32)
DIFFICULTY = 2.0 * FEATURES[:, 2].astype(np.float64)


def make(features=FEATURES, difficulty=None):
    return OnlineIRT(ItemPool(400, difficulty, features=features), CurriculumConfig())


def result(i, item, success):
    return ItemFeedback(id=f"g{i}", env="e", item=item, skill=None, n=8, success=success, policy_step=0)


def teach(strategy, items):
    draws = np.random.default_rng(1)
    for i in items:
        strategy.observe(result(i, i, draws.binomial(8, 1 / (1 + math.exp(DIFFICULTY[i]))) / 8))
    return strategy


def test_features_of_a_prompt_are_logarithms_of_counts():
    assert prompt_features("12 + 12 = ? Say it. 7x") == pytest.approx([math.log1p(n) for n in (22, 8, 7, 3, 5, 4)])
    assert prompt_features("") == (0.0,) * len(FEATURE_NAMES)


def test_the_regression_by_hand():
    predictor = DifficultyPredictor(np.array([[1.0], [-1.0]], np.float32), 25.0)
    assert predictor.predict().tolist() == [0.0, 0.0]
    assert predictor.variance() == 25.0
    predictor.learn(0, 5.0, 1.0)
    weight = (5.0 / 10) / (1 + 1 / 10)
    assert predictor.predict() == pytest.approx([weight, -weight])
    assert predictor.predict_one(1) == predictor.predict()[1]
    assert predictor.variance() == pytest.approx((20 * 25 + 25) / 21)
    for _ in range(100):
        predictor.learn(1, 50.0, 1.0)
    assert predictor.variance() == 25.0, "however bad the predictions"


def test_irt_predicts_items_it_has_never_met_and_draws_by_it():
    strategy = teach(make(), range(200))
    unmet = np.arange(200, 400)
    assert np.corrcoef(strategy._expected()[0][unmet], DIFFICULTY[unmet])[0, 1] > 0.9
    blind = teach(make(features=None), range(200)).weights()[unmet]
    assert np.ptp(blind) == 0.0
    weights, middle = strategy.weights()[unmet], np.abs(DIFFICULTY[unmet]) < 1
    assert weights[middle].mean() > 1.3 * weights[~middle].mean()


def test_features_that_say_nothing_are_told_by_the_error_of_predictions():
    noise = np.random.default_rng(5).normal(size=FEATURES.shape).astype(np.float32)
    useless, useful = teach(make(noise), range(200)), teach(make(), range(200))
    assert np.std(useless._expected()[0][200:]) < 0.3 * np.std(useful._expected()[0][200:])
    assert useful._expected()[1][399] < useless._expected()[1][399]


def test_a_difficulty_from_the_task_goes_before_any_prediction():
    assert "feature_pull" not in make(difficulty=DIFFICULTY).arrays()


def test_constant_features_predict_nothing():
    strategy = teach(make(np.full((400, 6), 3.0, np.float32)), range(50))
    assert not strategy._expected()[0][50:].any()
    assert np.isfinite(strategy.weights()).all()


def test_the_state_goes_on_alike_and_one_of_told_difficulties_starts_without_predictions():
    whole, first, second, old = make(), make(), make(), make()
    teach(whole, range(120))
    teach(first, range(60))
    second.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(first.state_dict())))
    draws = np.random.default_rng(1)
    passes = [draws.binomial(8, 1 / (1 + math.exp(DIFFICULTY[i]))) / 8 for i in range(120)]
    for i in range(60, 120):
        second.observe(result(i, i, passes[i]))
    assert second.snapshot().id == whole.snapshot().id
    state = teach(make(features=None), range(60)).state_dict()
    old.load_state_dict(state)
    assert not old._expected()[0][60:].any()
    teach(old, range(60, 200))
    assert np.corrcoef(old._expected()[0][200:], DIFFICULTY[200:])[0, 1] > 0.9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feature_precision", np.full(36, np.nan)),
        ("feature_precision", -np.eye(6)),
        ("feature_pull", np.full(6, np.inf)),
        ("feature_errors", np.array([-1.0, 0.0])),
    ],
)
def test_a_state_that_cannot_be_is_refused(name, value):
    strategy = make()
    state = strategy.state_dict()
    state["arrays"][name] = value.tobytes()
    with pytest.raises(SchemaError, match=name):
        strategy.load_state_dict(state)


@pytest.mark.parametrize("features", [FEATURES[:3], FEATURES[0], np.full((400, 6), np.nan, np.float32)])
def test_features_that_are_not_one_row_an_item_are_refused(features):
    with pytest.raises(ConfigError, match=r"items\.features"):
        ItemPool(400, features=features)


class Sums(Environment):
    def __init__(self, difficulty=None):
        self.difficulty = difficulty

    def __len__(self):
        return 3

    def task(self, index):
        return Task(item=str(index), prompt="9+" * index, difficulty=self.difficulty)


def test_the_features_come_from_the_prompts_of_an_environment_without_difficulties():
    items = items_of(Sums())
    assert items.features.tolist() == pytest.approx(np.array([prompt_features("9+" * i) for i in range(3)]))
    assert items_of(Sums(difficulty=1.0)).features is None
