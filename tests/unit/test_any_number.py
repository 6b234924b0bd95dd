"""Whatever finite numbers come, no state machine that folds them dies, and what it says is finite again.

Scores, rewards, ratings and difficulties of all magnitudes from 1e-320 to 1e308, of both signs, on offsets, with values
missing. A refusal is an error of the project's own that names the value; the machine then goes on with the next group.
"""

import math
import random
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.batcher.whitening import whiten_batch
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.evaluator.logic.history import EvaluationHistory
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import CHECKS, EnvMonitor
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.offline.compare.logic import ComparedGroup, ComparedRevision, compare
from lachesis.pipeline.scorer.config import Aggregation, RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.logic.rating_figures import RaterAgreement
from lachesis.pipeline.scorer.rater import to_rating
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.pipeline.trainer.metrics import reward_figures
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import Commit, EvalEvent, GroupReward, GroupScore, GroupSignals
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PackedHistogram
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import GroupRef, Mismatch
from lachesis.services.observe.comparison import report
from lachesis.services.observe.comparison_page import markdown
from lachesis.services.observe.overview import RewardCurve
from lachesis.services.observe.rewards import describe_rewards, rewards_of

SEEDS = range(16)


class Numbers:
    """A source of finite numbers with a habit of its own: a range of magnitudes, an offset, signs, what is missing."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        low = rng.choice([-320.0, -160.0, 0.0, 100.0, 154.0, 307.0])
        self._magnitudes = low, min(308.0, low + rng.choice([1.0, 60.0, 700.0]))
        self._offset = rng.choice([0.0, 0.0, 1e3, -1e9, 1e155, -1.7e308])
        self._negative = rng.choice([0.0, 0.5, 1.0])
        self._missing = rng.choice([0.0, 0.2])
        self._usual = rng.choice([0.0, 0.9])

    def one(self) -> float:
        rng = self.rng
        if rng.random() < self._usual:
            return rng.random()
        value = 10 ** rng.uniform(*self._magnitudes)
        value = self._offset + (-value if rng.random() < self._negative else value)
        return max(-1.7e308, min(1.7e308, value))

    def column(self, n: int) -> list[float | None]:
        column = [None if self.rng.random() < self._missing else self.one() for _ in range(n)]
        return column if self.rng.random() < 0.9 else [column[0]] * n


@pytest.fixture(params=SEEDS)
def numbers(request):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an overflow of NumPy is a warning, and infinity from there on
        yield Numbers(request.param)


def score_of(numbers: Numbers, n: int, samples: int = 4) -> GroupScore:
    return GroupScore(
        group=f"{n + 1:032x}",
        seq=n + 1,
        item=f"item-{n % 7}",
        policy_step=n // 16,
        scores=numbers.column(samples),
        ratings={name: numbers.column(samples) for name in ("a", "b", "c")},
        lengths=[numbers.rng.choice([0, 1, 50, 10**6, 2**62]) for _ in range(samples)],
        disagreement=(abs(numbers.one()), abs(numbers.one())),
        success=numbers.one(),
        signals=GroupSignals(
            logprobs=numbers.column(samples),
            texts=[numbers.rng.getrandbits(32) for _ in range(samples)],
            distinct=numbers.one(),
        ),
    )


def reward_of(numbers: Numbers, score: GroupScore) -> GroupReward:
    found = None
    with suppress(DataError):
        found = group_advantage(score.scores, AdvantageConfig(), score.lengths)
    advantages = list(found.advantages) if found else [max(-1e100, min(1e100, numbers.one())) for _ in score.scores]
    return GroupReward(
        group=score.group,
        seq=score.seq,
        item=score.item,
        policy_step=score.policy_step,
        verdict=found.verdict if found else "quarantined",
        scores=score.scores,
        rewards=numbers.column(len(score.scores)),
        advantages=advantages,
        snapshot="s",
        mean=None,
        std=None,
        range=None,
        n_valid=len(score.scores),
    )


def assert_finite(values):
    assert all(value is None or math.isfinite(value) for value in values), list(values)


def test_health_judges_every_window_and_its_state_comes_back(numbers):
    monitor, windows = EnvMonitor(HealthConfig(window=16, halts=CHECKS)), 0
    for n in range(16 * 16):
        score = score_of(numbers, n)
        monitor.score(score)
        monitor.reward(reward_of(numbers, score), "grpo")
        monitor.trained([Mismatch(numbers.one(), numbers.one(), numbers.one(), numbers.one())])
        monitor.record_stale([numbers.rng.getrandbits(62)])
        ref = GroupRef(group=score.group, seq=n + 1, env="e", sequences=4, tokens=2**62, policy_step=0, advantages=[])
        monitor.batch(n, [ref])
        found = monitor.judge_batches() if monitor.batches_full else []
        if monitor.window_full:
            found += monitor.evaluate()
            windows += 1
        if not found:
            continue
        event = AlertEvent(
            run="r", env="e", revision="live", window=0, groups=monitor.groups, source="groups", results=found,
            standing=monitor.standing, commit=Commit(term="t", index=0, cursors={}, delta=b"", crc32=0),
        )  # fmt: skip
        assert decode(AlertEvent, encode(event)).results == found
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(monitor.state_dict()))
        again = EnvMonitor(HealthConfig(window=16, halts=CHECKS))
        again.load_state_dict(state)
        assert msgspec.msgpack.encode(again.state_dict()) == msgspec.msgpack.encode(monitor.state_dict())
    assert windows == 16


def evaluation(numbers: Numbers, n: int) -> EvalEvent:
    return EvalEvent(
        run="r", env="e", revision="live", policy_version="0-first-abc", policy_step=n, items=4, k=2,
        temperature=numbers.one(), avg=numbers.one(), pass_at_k=numbers.one(), greedy=numbers.one(), started_ns=n,
        ended_ns=n + 1, error=0.1,
    )  # fmt: skip


def test_evaluations_are_compared(numbers):
    monitor = EnvMonitor(HealthConfig())
    history = EvaluationHistory.of()
    for n in range(8):
        event = evaluation(numbers, n)
        history.record(event)
        for result in monitor.judge_evaluation(event):
            assert_finite([result.value, result.threshold])


@pytest.mark.parametrize("mode", ["zscore", "minmax", "none"])
def test_the_normalizer_goes_on(numbers, mode):
    config = NormalizationConfig(window=4, warmup_samples=4, warmup_groups=2, history=3, mode=mode)
    normalizer, refused, ready = EnvNormalizer("e", config), 0, []
    for n in range(64):
        normalizer.member(n + 1, f"g{n}")
        columns = {"score": numbers.column(4), "rater": numbers.column(4)}
        try:
            normalizer.resolve(f"g{n}", n + 1, columns)
        except DataError:
            refused += 1
            normalizer.resolve(f"g{n}", n + 1, None)
        ready += normalizer.step().ready
    for group in ready:
        for key, column in group.values.items():
            assert_finite(group.snapshot.normalize(key, column))
    assert_finite(normalizer.metrics().values())
    again = EnvNormalizer("e", config)
    again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(normalizer.state_dict())))
    large = [
        x for group in ready for column in group.values.values() for x in column if x is not None and abs(x) > 1e12
    ]
    assert not large
    assert refused + len(ready) >= 40


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimators_return_finite_advantages_or_refuse(numbers, estimator):
    for _ in range(32):
        scores = numbers.column(numbers.rng.choice([1, 2, 4, 16]))
        ratings = {name: numbers.column(len(scores)) for name in ("a", "b")}
        with suppress(DataError):
            found = group_advantage(scores, AdvantageConfig(estimator=estimator), [7] * len(scores), ratings)
            assert_finite([*found.advantages, found.mean, found.std, found.range])


def test_batches_are_whitened(numbers):
    """Advantages on the wire are at most 1e100."""
    refs = [
        GroupRef(
            group=f"{n:032x}",
            seq=n + 1,
            env="e",
            sequences=4,
            tokens=40,
            policy_step=0,
            advantages=[None if x is None else max(-1e100, min(1e100, x)) for x in numbers.column(4)],
        )
        for n in range(16)
    ]
    tokens = {ref.seq: [numbers.rng.choice([0, 1, 10**6]) for _ in range(4)] for ref in refs}
    for ref in whiten_batch(refs, tokens, 1e-3):
        assert_finite(ref.advantages)


@pytest.mark.parametrize("rule", get_args(Aggregation))
def test_ratings_are_aggregated(numbers, rule):
    low, high = sorted([numbers.one(), numbers.one()])
    if not (low < high and math.isfinite(high - low)):
        low, high = 0.0, 1.0
    members = [EnsembleMember(name=f"r{i}", reference="m:r", version="1", bounds=(low, high)) for i in range(3)]
    ensemble = Ensemble(members, ScoringConfig(raters=[RaterConfig(rater="m:r")] * 3, aggregation=rule, trim=0.4))
    for _ in range(16):
        columns = {f"r{i}": [to_rating(value, (low, high)) for value in numbers.column(4)] for i in range(3)}
        found = ensemble.score(columns)
        assert_finite([*found.scores, *(found.disagreement or ())])
        assert all(value is None or 0 <= value <= 1 for column in found.ratings.values() for value in column)


def test_figures_of_raters_are_finite_or_left_out(numbers):
    """What the scorer hands on is within +-1e12, and its success is a share."""
    agreement = RaterAgreement()
    for n in range(300):
        score = score_of(numbers, n)
        ratings = {name: [None if x is None else max(-1e12, min(1e12, x)) for x in column]
                   for name, column in score.ratings.items()}  # fmt: skip
        handed_on = msgspec.structs.replace(
            score, ratings=ratings, disagreement=(numbers.rng.random(), 1.0), success=numbers.rng.random()
        )
        agreement.add_group(handed_on)
    assert_finite(agreement.metrics("e").values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_curriculum_draws(numbers, strategy):
    n = 32
    items = ItemPool(n, difficulty=np.array([numbers.one() for _ in range(n)]))
    if strategy in {"easy_first", "competence"} and len(set(items.difficulty)) == 1:
        with pytest.raises(ConfigError, match="no difficulty"):
            load_strategy(items, CurriculumConfig(strategy=strategy))
        return
    made = load_strategy(items, CurriculumConfig(strategy=strategy))
    for i in range(128):
        feedback = ItemFeedback(id=f"{i}", env="e", item=i % n, skill=None, n=4, success=numbers.one(), policy_step=i)
        with suppress(DataError):  # a success beyond [0, 1]
            made.observe(feedback)
        made.observe(replace(feedback, id=f"{i}+", success=numbers.rng.random()))
    assert np.isfinite(made.weights()).all()
    assert made.weights().sum() > 0
    assert_finite(made.metrics().values())
    assert len(made.sample(8, np.random.default_rng(0))) == 8


def test_live_views_say_something(numbers):
    curve = RewardCurve()
    for step in range(64):
        figures = {"train/step": float(step), "reward/mean": numbers.one(), "reward/e/mean": numbers.one()}
        curve.record_step(figures)
        assert describe_rewards(figures["reward/mean"], rewards_of(figures))
        trend = curve.trend()
        assert_finite([trend])


def test_a_trainer_reports_finite_means(numbers):
    refs = [
        GroupRef(
            group=f"{n:032x}",
            seq=n + 1,
            env=f"e{n % 3}",
            sequences=4,
            tokens=40,
            policy_step=0,
            advantages=[],
            score=numbers.one(),
        )
        for n in range(16)
    ]
    figures = reward_figures(refs)
    assert_finite(figures.values())
    assert set(figures) == {"reward/mean", "reward/e0/mean", "reward/e1/mean", "reward/e2/mean"}


def test_histograms_of_seconds_travel(numbers):
    histogram = Histogram()
    for _ in range(64):
        histogram.record(numbers.one())
        packed = msgspec.msgpack.decode(msgspec.msgpack.encode(histogram.pack()), type=PackedHistogram)
        assert_finite([packed.total, packed.low, packed.high, histogram.quantile(0.5)])


def test_revisions_are_compared(numbers):
    revisions = []
    for name in ("live", "again"):
        scores = [score_of(numbers, n) for n in range(24)]
        groups = {one.group: ComparedGroup("e", one, reward_of(numbers, one)) for one in scores}
        revisions.append(ComparedRevision(name, groups, 0, complete=True))
    found = compare("r", *revisions)
    decoded = msgspec.json.decode(msgspec.json.encode(found), type=type(found))
    assert decoded == found
    assert markdown(report(found, [None] * len(found.disputed)))
