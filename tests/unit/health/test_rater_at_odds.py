"""Raters that are alike are hardly ever at odds by chance, however alike the samples of a group are."""

import math

import numpy as np
import pytest

from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.hacking import RaterAtOdds
from lachesis.pipeline.scorer.logic.intervals import MIN_GROUPS
from lachesis.schemas.annotations import GroupScore

SAMPLES = 8


def window(rng: np.random.Generator, groups: int, correlation: float, odd: float = 0.0) -> HealthWindow:
    """Three raters with one error each, correlated within a group as the truth is; the first has a larger one."""

    def correlated(*shape: int) -> np.ndarray:
        common, own = rng.normal(size=(groups, 1, *shape)), rng.normal(size=(groups, SAMPLES, *shape))
        return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own

    ratings = correlated(1) + np.array([0.5 + odd, 0.5, 0.5]) * correlated(3)
    return HealthWindow(
        scores=[
            GroupScore(
                group=f"{i:032x}", seq=i + 1, item="i", policy_step=0, scores=[0.0] * SAMPLES, lengths=[1] * SAMPLES,
                ratings={f"r{k}": rated[:, k].tolist() for k in range(3)},
            )
            for i, rated in enumerate(ratings)
        ]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7])
def test_raters_that_are_alike_are_seldom_found_at_odds(correlation: float) -> None:
    rng = np.random.default_rng(7)
    found = []
    for _ in range(10):
        check = RaterAtOdds()
        found += [check.evaluate(window(rng, 32, correlation)).severity for _ in range(12)]
    assert found.count("inform") <= 6  # 1.2 are expected at the nominal 1 % of 120, of each of two kinds


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7])
def test_a_rater_that_turns_is_found(correlation: float) -> None:
    rng = np.random.default_rng(8)
    check = RaterAtOdds()
    for _ in range(3):
        check.evaluate(window(rng, 64, correlation))
    result = check.evaluate(window(rng, 64, correlation, odd=1.5))
    assert result.severity == "inform"
    assert "without r0" in result.reason
    assert "more than they did at first" in result.reason


def test_too_few_groups_are_not_judged() -> None:
    result = RaterAtOdds().evaluate(window(np.random.default_rng(9), MIN_GROUPS - 1, 0.3))
    assert (result.severity, result.reason) == ("idle", "fewer than 20 groups whose samples have two ratings")
