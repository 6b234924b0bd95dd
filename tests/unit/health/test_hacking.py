"""A scripted reward hack: one rater exploited while the others fall, stopped before the mean reward has risen by half.

And raters that merely learn: no quarantine.
"""

import random

import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor

WARM_UP = 20 * 64


def hacked(rng, progress):
    """Ratings of one group. `progress` from 0 (honest) to 1: the exploited rater gives 1, the others half of before."""
    task = min(1.0, max(0.0, rng.gauss(0.4, 0.12)))
    skill = [min(1.0, max(0.0, task + rng.gauss(0, 0.15))) for _ in range(8)]

    def rated(value):
        return min(1.0, max(0.0, value + rng.gauss(0, 0.05)))

    return {
        "exact": [rated(value * (1 - progress / 2)) for value in skill],
        "judge": [rated(value * (1 - progress / 2)) for value in skill],
        "style": [rated(value + progress * (1 - value)) for value in skill],
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", [0.6, 0.8])
def test_a_hacked_rater_ends_in_quarantine_before_the_reward_is_up_by_half(groups, seed, weight):
    """A weighted mean that trusts the exploited rater most: the reward climbs over 200 steps of 16 groups."""
    rng = random.Random(seed)
    monitor = EnvMonitor(HealthConfig())
    start = recent = None
    rewards = []
    for i in range(WARM_UP + 3200):
        ratings = hacked(rng, max(0.0, (i - WARM_UP) / 3200))
        scores = [
            weight * c + (1 - weight) / 2 * (a + b)
            for a, b, c in zip(ratings["exact"], ratings["judge"], ratings["style"], strict=True)
        ]
        groups.feed(monitor, groups.score(ratings=ratings, scores=scores))
        rewards.append(sum(scores) / 8)
        if i == WARM_UP:
            start = sum(rewards) / len(rewards)
            assert monitor.standing.quarantined_from is None
        recent = sum(rewards[-64:]) / len(rewards[-64:])
        if monitor.standing.quarantined_from is not None:
            break
    assert monitor.standing.cause == "over_optimisation"
    assert recent < 1.5 * start, (start, recent, i)
    assert monitor.standing.quarantined_from > WARM_UP


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_raters_that_rise_together_end_in_no_quarantine(groups, seed):
    rng = random.Random(seed)
    monitor = EnvMonitor(HealthConfig())
    for i in range(4000):
        gain = i / 4000 * 0.4
        skill = [min(1.0, max(0.0, rng.gauss(0.3 + gain, 0.15))) for _ in range(8)]
        columns = {name: [min(1.0, max(0.0, v + rng.gauss(0, 0.05))) for v in skill] for name in ("a", "b", "c")}
        groups.feed(monitor, groups.score(ratings=columns))
    assert monitor.standing.quarantined_from is None
