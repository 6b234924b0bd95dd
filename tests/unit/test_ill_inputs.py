"""Every public entry point answers ill input with a sentence, and no raw TypeError, KeyError or AssertionError.

Each entry point gets each ill input in place of one argument. It may take it for what it is (an empty list may be
fine). What it refuses, it refuses with an error of the project that says what was wrong.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lachesis.pipeline.batcher.whitening import whiten, whiten_batch
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES
from lachesis.pipeline.curriculum.logic.registry import find_strategy, load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.library.reward_normalizer import RewardNormalizer, WelfordAccumulator
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import FormatMarker, RewardConfig
from lachesis.pipeline.normalizer.estimators.estimator import RewardGroup
from lachesis.pipeline.normalizer.estimators.loader import builtin_estimator, group_advantage
from lachesis.pipeline.normalizer.estimators.shaping import shaped_advantage
from lachesis.pipeline.normalizer.estimators.user_estimator import estimator
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.normalizer.logic.accumulator import MomentAccumulator, decay_weights
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.normalizer.logic.ranks import RankCounts, RankTable
from lachesis.pipeline.normalizer.logic.reliability import residuals, shares, weighted
from lachesis.pipeline.offline.compare.condition import parse_condition
from lachesis.pipeline.offline.compare.significance import mean_interval, share_interval
from lachesis.pipeline.offline.compare.statistics import distribution, histograms, rank_correlation, within_groups
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.accuracy import rater_accuracies
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.logic.intervals import StreamingCI, alpha_interval
from lachesis.pipeline.scorer.logic.krippendorff import CategoryAlpha, IntervalAlpha, RaterReliability
from lachesis.pipeline.scorer.rater import Rating, rater, to_rating
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.ledger import GroupRef

ILL = {
    "none": None,
    "text": "0.5",
    "number": 0.5,
    "negative": -3,
    "nan": math.nan,
    "infinity": math.inf,
    "empty list": [],
    "empty table": {},
    "list of None": [None, None],
    "list with NaN": [1.0, math.nan],
    "list with infinity": [-math.inf, 1.0],
    "list of text": ["1", "2"],
    "list of lists": [[0.1, 0.2], [0.3]],
    "list of complex": [1j, 2j],
    "table of text": {"a": "b"},
    "table by number": {1: [0.5, 0.5]},
    "table of short lists": {"a": [0.5], "b": []},
    "matrix": np.ones((2, 2)),
    "array of no dimension": np.array(1.0),
    "object": object(),
    "huge": [1e308, -1e308],
    "far too long": [0.5] * 7,
}

CONFIG = ScoringConfig(raters=[RaterConfig(rater="m:a"), RaterConfig(rater="m:b")])
MEMBERS = [EnsembleMember(name=n, reference=f"m:{n}", version="1", bounds=(0.0, 1.0)) for n in "ab"]
SNAPSHOT = EnvNormalizer("e", NormalizationConfig(warmup_samples=0, warmup_groups=0)).snapshot()
REF = {"group": "g", "seq": 1, "env": "e", "sequences": 2, "tokens": 9, "policy_step": 0, "advantages": [1.0, -1.0]}
FEEDBACK = {"id": "f", "env": "e", "item": 1, "skill": None, "n": 2, "success": 0.5, "policy_step": 1}


def normalizer() -> EnvNormalizer:
    made = EnvNormalizer("e", NormalizationConfig())
    made.member(1, "g")
    return made


def strategy(name: str) -> Strategy:
    return load_strategy(ItemPool(4, difficulty=np.arange(4.0)), CurriculumConfig(strategy=name))


def advantage(name: str) -> dict[str, Callable[[Any], Any]]:
    config, fine = AdvantageConfig(estimator=name), {"a": [0.0, 1.0]}
    return {
        f"{name} rewards": lambda x: group_advantage(x, config, [1, 1], {"a": x}),
        f"{name} lengths": lambda x: group_advantage([0.0, 1.0], config, x, fine),
        f"{name} ratings": lambda x: group_advantage([0.0, 1.0], config, [1, 1], x),
        f"{name} column": lambda x: group_advantage([0.0, 1.0], config, [1, 1], {"a": x}),
    }


def fields(kind: Any, **given: Any) -> dict[str, Callable[[Any], Any]]:
    """Each field of a configuration."""
    return {
        f"{kind.__name__}.{name}": lambda x, name=name: kind(**{**given, name: x})  # type: ignore[misc]
        for name in kind.__struct_fields__
    }


ENTRY_POINTS: dict[str, Callable[[Any], Any]] = {
    # agreement
    "IntervalAlpha.add_unit": lambda x: IntervalAlpha().add_unit(x),
    "IntervalAlpha.remove": lambda x: IntervalAlpha().remove(x),
    "IntervalAlpha.merge": lambda x: IntervalAlpha().merge(x),
    "IntervalAlpha.from_state_dict": IntervalAlpha.from_state_dict,
    "CategoryAlpha": CategoryAlpha,
    "CategoryAlpha.add_unit": lambda x: CategoryAlpha("ratio").add_unit(x),
    "CategoryAlpha.merge": lambda x: CategoryAlpha("nominal").merge(x),
    "RaterReliability": RaterReliability,
    "RaterReliability.add_unit": lambda x: RaterReliability("ab").add_unit(x),
    "RaterReliability.add_unit a": lambda x: RaterReliability("ab").add_unit({"a": x, "b": 1.0}),
    "RaterReliability.merge": lambda x: RaterReliability("ab").merge(x),
    "alpha_interval": alpha_interval,
    "alpha_interval groups": lambda x: alpha_interval([[0.1, 0.2]] * 2, x),
    "alpha_interval level": lambda x: alpha_interval([[0.1, 0.2]] * 2, level=x),
    "StreamingCI.add_unit": lambda x: StreamingCI().add_unit("g", x),
    "StreamingCI.merge": lambda x: StreamingCI().merge(x),
    "StreamingCI.from_state_dict": StreamingCI.from_state_dict,
    "StreamingCI.interval": lambda x: StreamingCI().interval(x),
    "rater_accuracies": rater_accuracies,
    "rater_accuracies sample": lambda x: rater_accuracies([x] * 4),
    # aggregation
    "Ensemble members": lambda x: Ensemble(x, CONFIG),
    "Ensemble config": lambda x: Ensemble(MEMBERS, x),
    "Ensemble.score": lambda x: Ensemble(MEMBERS, CONFIG).score(x),
    "Ensemble.score column": lambda x: Ensemble(MEMBERS, CONFIG).score({"a": x, "b": [Rating(1.0)] * 2}),
    "Ensemble.score rating": lambda x: Ensemble(MEMBERS, CONFIG).score({"a": [Rating(x)], "b": [Rating(1.0)]}),
    "rater": rater,
    "rater bounds": lambda x: rater(bounds=x),
    "EnsembleMember.bounds": lambda x: Ensemble([replace(MEMBERS[0], bounds=x)], CONFIG),
    "EnsembleMember.weight": lambda x: Ensemble([replace(MEMBERS[0], weight=x)], CONFIG),
    "to_rating": lambda x: to_rating(x, (0.0, 1.0)),
    "residuals": residuals,
    "residuals column": lambda x: residuals({"a": x, "b": [0.5, 0.5]}),
    "shares": shares,
    "weighted": lambda x: weighted(x, [0.5, 0.5], {"a": 0.5, "b": 0.5}),
    "weighted scores": lambda x: weighted({"a": [0.5, 0.5]}, x, {"a": 1.0}),
    "weighted weights": lambda x: weighted({"a": [0.5, 0.5]}, [0.5, 0.5], x),
    # normalizers
    "RewardNormalizer mode": RewardNormalizer,
    "RewardNormalizer clip": lambda x: RewardNormalizer(clip=x),
    "RewardNormalizer warmup": lambda x: RewardNormalizer(warmup=x),
    "RewardNormalizer eps": lambda x: RewardNormalizer(eps=x),
    "RewardNormalizer.normalize": lambda x: RewardNormalizer().normalize(x),
    "RewardNormalizer.load_state_dict": lambda x: RewardNormalizer().load_state_dict(x),
    "WelfordAccumulator.update": lambda x: WelfordAccumulator().update(x),
    "WelfordAccumulator.update_batch": lambda x: WelfordAccumulator().update_batch(x),
    "WelfordAccumulator.load_state_dict": lambda x: WelfordAccumulator().load_state_dict(x),
    **{
        f"WelfordAccumulator.load_state_dict {name}": lambda x, name=name: WelfordAccumulator().load_state_dict(
            {"count": 2, "mean": 0.5, "m2": 0.5, "min": 0.0, "max": 1.0, name: x}
        )
        for name in ("count", "mean", "m2", "min", "max")
    },
    **{
        f"RewardNormalizer.load_state_dict {name}": lambda x, name=name: RewardNormalizer().load_state_dict(
            {**RewardNormalizer().state_dict(), name: x}
        )
        for name in RewardNormalizer().state_dict()
    },
    **{
        f"EnvNormalizer.load_state_dict {name}": lambda x, name=name: EnvNormalizer(
            "e", NormalizationConfig()
        ).load_state_dict({**EnvNormalizer("e", NormalizationConfig()).state_dict(), name: x})
        for name in EnvNormalizer("e", NormalizationConfig()).state_dict()
    },
    "IntervalAlpha.from_state_dict sums": lambda x: IntervalAlpha.from_state_dict({"sums": {"2": x}}),
    "StreamingCI.from_state_dict groups": lambda x: StreamingCI.from_state_dict({"groups": {"g": x}}),
    "EnvNormalizer.member": lambda x: normalizer().member(x, "h"),
    "EnvNormalizer.resolve": lambda x: normalizer().resolve("g", 1, x),
    "EnvNormalizer.resolve column": lambda x: normalizer().resolve("g", 1, {"score": x}),
    "EnvNormalizer.load_state_dict": lambda x: EnvNormalizer("e", NormalizationConfig()).load_state_dict(x),
    "EnvNormalizer.apply": lambda x: EnvNormalizer("e", NormalizationConfig()).apply(x),
    "EnvNormalizer.snapshot": lambda x: EnvNormalizer("e", NormalizationConfig()).snapshot(x),
    "NormalizationSnapshot.normalize": lambda x: SNAPSHOT.normalize("score", x),
    "MomentAccumulator.add_group": lambda x: MomentAccumulator().add_group(x),
    "RankCounts.add_group": lambda x: RankCounts().add_group(x),
    "RankTable.rank": lambda x: RankTable.of([(1, RankCounts(0, 1, {0: 2}))]).rank(x),
    "decay_weights": lambda x: decay_weights(x, 3),
    # advantages
    **{name: call for kind in ESTIMATORS for name, call in advantage(kind).items()},
    "RewardGroup": lambda x: RewardGroup(x, 1e-3),
    "estimator": estimator,
    **{f"{name} std_floor": lambda x, name=name: builtin_estimator(name)(x) for name in ESTIMATORS},
    "shaped_advantage": lambda x: shaped_advantage(x, [0.1, 0.1], AdvantageConfig()),
    "shaped_advantage bonus": lambda x: shaped_advantage([0.0, 1.0], x, AdvantageConfig()),
    "whiten": lambda x: whiten(x, [1, 2]),
    "whiten tokens": lambda x: whiten([1.0, 2.0], x),
    "whiten std_floor": lambda x: whiten([1.0, 2.0], [1, 2], x),
    "whiten_batch": lambda x: whiten_batch(x, {1: [1, 1]}, 1e-3),
    "whiten_batch tokens": lambda x: whiten_batch([GroupRef(**REF)], x, 1e-3),
    "whiten_batch counts": lambda x: whiten_batch([GroupRef(**REF)], {1: x}, 1e-3),
    "whiten_batch std_floor": lambda x: whiten_batch([GroupRef(**REF)], {1: [1, 1]}, x),
    # curriculum
    "ItemPool count": ItemPool,
    "ItemPool difficulty": lambda x: ItemPool(2, difficulty=x),
    "ItemPool skill": lambda x: ItemPool(2, skill=x),
    "Strategy.observe": lambda x: Strategy(ItemPool(2), CurriculumConfig()).observe(x),
    **{
        f"{name}.observe {field}": lambda x, name=name, field=field: strategy(name).observe(
            ItemFeedback(**{**FEEDBACK, field: x})
        )
        for name in STRATEGIES
        for field in ("item", "n", "success", "policy_step")
    },
    "Strategy.sample": lambda x: strategy("uniform").sample(x, np.random.default_rng(0)),
    "Strategy.load_state_dict": lambda x: strategy("irt").load_state_dict(x),
    "find_strategy": lambda x: find_strategy(CurriculumConfig(strategy=x)),
    # comparisons
    "distribution": distribution,
    "histograms": lambda x: histograms(x, [0.5]),
    "rank_correlation": lambda x: rank_correlation(x, [0.5, 1.0]),
    "within_groups": within_groups,
    "within_groups column": lambda x: within_groups([(x, [1, 2])]),
    "share_interval": lambda x: share_interval(x, 5),
    "share_interval total": lambda x: share_interval(1, x),
    "mean_interval": mean_interval,
    "parse_condition": lambda x: parse_condition(x, ["alpha_a"]),
    # configuration
    "load": lambda x: load(run_config_type(), sets=[f"batching.batch_size={x}"]),
    **fields(ScoringConfig),
    **fields(RaterConfig, rater="m:a"),
    **fields(NormalizationConfig),
    **fields(AdvantageConfig),
    **fields(RewardConfig),
    **fields(FormatMarker, marker="<think>"),
    **fields(HealthConfig),
    **fields(CurriculumConfig),
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_ill_input_gets_a_sentence(name: str) -> None:
    assert_sentences(ENTRY_POINTS[name])


def assert_sentences(entry_point: Callable[[Any], Any]) -> None:
    found: dict[str, Exception] = {}
    for kind, value in ILL.items():
        try:
            entry_point(value)
        except Exception as error:  # noqa: BLE001 - what is looked for
            found[kind] = error
    assert not {kind: error for kind, error in found.items() if not isinstance(error, LachesisError)}
    assert not {kind: error for kind, error in found.items() if len(str(error)) < 20}, "a sentence"
