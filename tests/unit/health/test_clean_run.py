"""10,000 groups recorded from real training: five runs whose policies improve. Nothing may be quarantined or halted.

`recording.npz` is what `tests/benchmarks/health_recording.py` wrote; no threshold was chosen by it.
"""

from pathlib import Path

import numpy as np
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import LADDER
from lachesis.pipeline.health.logic.monitor import CHECKS, EnvMonitor
from lachesis.schemas.annotations import GroupScore, GroupSignals
from lachesis.schemas.ids import is_group_id

RECORDING = Path(__file__).parent / "recording.npz"
RATERS = ("exact", "similar", "formed")


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDING) as file:
        return {name: file[name] for name in file.files}


RULES = {
    "uwo": lambda ratings: ratings.mean(axis=1) - 0.5 * ratings.var(axis=1),
    "lcb": lambda ratings: ratings.mean(axis=1) - ratings.std(axis=1) / 2**0.5,  # the default of three raters
}


def scores_of(recorded, seed, rule):
    for seq, i in enumerate(np.flatnonzero(recorded["seed"] == seed).tolist(), start=1):
        ratings = recorded["ratings"][i].astype(float)
        yield GroupScore(
            group=f"{seq:032x}",
            seq=seq,
            item=f"item-{i}",
            policy_step=int(recorded["step"][i]),
            scores=RULES[rule](ratings).tolist(),
            ratings={name: ratings[:, k].tolist() for k, name in enumerate(RATERS)},
            lengths=recorded["lengths"][i].tolist(),
            signals=GroupSignals(
                logprobs=recorded["logprobs"][i].tolist(),
                texts=recorded["texts"][i].tolist(),
                truncated=int(recorded["truncated"][i]),
                zeros=int(recorded["zeros"][i]),
                sure_run=int(recorded["sure_run"][i]),
            ),
        )


def test_the_recording_is_of_improving_policies(recorded):
    assert len(recorded["seed"]) >= 10_000
    assert is_group_id(f"{1:032x}")
    for seed in np.unique(recorded["seed"]):
        exact = recorded["ratings"][recorded["seed"] == seed][:, :, 0].mean(axis=1)
        assert exact[-320:].mean() > exact[:320].mean() + 0.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("window", [32, 64, 128])
@pytest.mark.parametrize("rule", RULES)
def test_no_false_quarantine_or_halt(groups, recorded, seed, window, rule):
    monitor = EnvMonitor(HealthConfig(window=window, halts=CHECKS))
    judged, worst = 0, "idle"
    for score in scores_of(recorded, seed, rule):
        results = groups.feed(monitor, score)
        if results is not None:
            judged += 1
            worst = max([worst, *(result.severity for result in results.values())], key=LADDER.index)
    assert judged == 2000 // window
    assert LADDER.index(worst) <= LADDER.index("warn")
    assert (monitor.standing.quarantined_from, monitor.standing.halted) == (None, False)
