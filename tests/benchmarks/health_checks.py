"""What the health checks cost: CPU time a group, in all and by check, over the recorded runs.

    python tests/benchmarks/health_checks.py

Groups of 8 samples and 3 raters from tests/unit/health/recording.npz; decoding of events is not part of it. Prints the
median of the recorded runs, and the size of the state that travels in each commit.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.schemas.annotations import GroupReward, GroupScore, GroupSignals

RECORDING = Path(__file__).parents[1] / "unit" / "health" / "recording.npz"
RATERS = ("exact", "similar", "formed")


def groups(seed: int) -> list[tuple[GroupScore, GroupReward]]:
    """The scores and rewards of one recorded run."""
    with np.load(RECORDING) as file:
        columns = {name: file[name][file["seed"] == seed] for name in file.files}
    found = []
    for i in range(len(columns["seed"])):
        ratings = columns["ratings"][i].astype(float)
        scores = (ratings.mean(axis=1) - 0.5 * ratings.var(axis=1)).tolist()
        same = {"group": f"{i:032x}", "seq": i + 1, "item": f"item-{i}", "policy_step": int(columns["step"][i])}
        score = GroupScore(
            **same,
            scores=scores,
            ratings={name: ratings[:, k].tolist() for k, name in enumerate(RATERS)},
            lengths=columns["lengths"][i].tolist(),
            signals=GroupSignals(logprobs=columns["logprobs"][i].tolist(), texts=columns["texts"][i].tolist()),
        )
        result = group_advantage(scores, AdvantageConfig())
        reward = GroupReward(
            **same,
            verdict=result.verdict,
            scores=scores,
            rewards=scores,
            advantages=list(result.advantages),
            snapshot="s",
            mean=result.mean,
            std=result.std,
            range=result.range,
            n_valid=result.n_valid,
        )
        found.append((score, reward))
    return found


class Timed(Check):
    """A check that adds its CPU time to a table."""

    def __init__(self, check: Check, spent: dict[str, float]) -> None:
        self.check, self.spent = check, spent
        self.name = check.name  # type: ignore[misc]

    def evaluate(self, window: HealthWindow) -> CheckResult:
        start = time.process_time()
        finding = self.check.evaluate(window)
        self.spent[self.check.name] += time.process_time() - start
        return finding


def main() -> None:
    runs, by_check, sizes = [], defaultdict(list), []
    for seed in range(5):
        fed = groups(seed)
        monitor = EnvMonitor(HealthConfig())
        spent: dict[str, float] = defaultdict(float)
        monitor._checks = [Timed(check, spent) for check in monitor._checks]
        start = time.process_time()
        for score, reward in fed:
            monitor.score(score)
            monitor.reward(reward, AdvantageConfig().estimator)
            if monitor.window_full:
                monitor.evaluate()
        runs.append((time.process_time() - start) / len(fed))
        for name, seconds in spent.items():
            by_check[name].append(seconds / len(fed))
        monitor._checks = [check.check for check in monitor._checks]
        sizes.append(len(msgspec.msgpack.encode(monitor.state_dict())))
    print(f"all checks: {1e6 * statistics.median(runs):.0f} us of CPU a group; state {max(sizes)} bytes")
    for name, values in sorted(by_check.items(), key=lambda item: -statistics.median(item[1])):
        print(f"  {name:<20} {1e6 * statistics.median(values):7.1f} us")


if __name__ == "__main__":
    main()
