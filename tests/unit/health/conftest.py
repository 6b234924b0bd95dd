"""Groups as healthy training gives them, for a test to change one thing about."""

import random

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import CHECKS, EnvMonitor
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.schemas.annotations import GroupReward, GroupScore, GroupSignals

SAMPLES = 8
RATERS = ("exact", "style", "judge")

ALL_HALT = HealthConfig(halts=CHECKS)


class Groups:
    """A source of groups, numbered from 1; `seq` of the next one."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.seq = 0

    def score(self, *, level: float = 0.5, ratings=None, lengths=None, signals=None, **changes) -> GroupScore:
        """A group whose samples are rated about `level` by three raters that mostly agree."""
        self.seq += 1
        rng = self.rng
        task = rng.gauss(level, 0.1)
        if ratings is None:
            skill = [task + rng.gauss(0, 0.15) for _ in range(SAMPLES)]
            ratings = {name: [min(1.0, max(0.0, value + rng.gauss(0, 0.05))) for value in skill] for name in RATERS}
        columns = list(ratings.values())
        reported = {
            "logprobs": [rng.gauss(-0.5, 0.05) for _ in range(SAMPLES)],
            "texts": [rng.getrandbits(32) for _ in range(SAMPLES)],
        }
        fields = {
            "group": f"{self.seq:032x}",
            "seq": self.seq,
            "item": f"item-{self.seq}",
            "policy_step": self.seq // 16,
            "scores": changes.get("scores")
            or [sum(column[i] for column in columns) / len(columns) for i in range(SAMPLES)],
            "ratings": ratings,
            "lengths": lengths or [rng.randint(40, 60) for _ in range(SAMPLES)],
            "signals": GroupSignals(**reported | (signals or {})),
        }
        return GroupScore(**fields | changes)

    def reward(self, score: GroupScore, estimator: str = "grpo", **changes) -> GroupReward:
        """The reward that follows from a score without normalization."""
        found = group_advantage(score.scores, AdvantageConfig(estimator=estimator), score.lengths)
        reward = GroupReward(
            group=score.group,
            seq=score.seq,
            item=score.item,
            policy_step=score.policy_step,
            verdict=found.verdict,
            scores=score.scores,
            rewards=score.scores,
            advantages=list(found.advantages),
            snapshot="s",
            mean=found.mean,
            std=found.std,
            range=found.range,
            n_valid=found.n_valid,
        )
        return msgspec.structs.replace(reward, **changes)

    def feed(self, monitor: EnvMonitor, score: GroupScore, reward: GroupReward | None = None):
        """Feed one group, and return the results of the window that it completes, by check; None before."""
        monitor.score(score)
        monitor.reward(reward or self.reward(score), "grpo")
        return {result.check: result for result in monitor.evaluate()} if monitor.window_full else None

    def windows(self, monitor: EnvMonitor, count: int, make=None, reward=None):
        """Feed whole windows made by `make(i)` (healthy groups if None), and return the results of each."""
        found = []
        i = 0
        while len(found) < count:
            score = (make or (lambda _: self.score()))(i)
            results = self.feed(monitor, score, reward(score) if reward else None)
            if results is not None:
                found.append(results)
            i += 1
        return found


@pytest.fixture
def groups():
    return Groups()


@pytest.fixture
def monitor():
    """A monitor in which every check may halt."""
    return EnvMonitor(ALL_HALT)
