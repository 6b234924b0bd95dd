"""Long answers that are dropped as stale are distinguished from short ones, whatever the unit of length."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.health.logic.staleness import StaleLengths
from lachesis.pipeline.health.logic.trends import longer_share
from lachesis.schemas.ledger import GroupRef

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=30)


def judged(kept, stale, factor=1.0):
    check = StaleLengths()
    check.record_lengths([factor * length for length in kept], [factor * length for length in stale])
    return check.evaluate()


def drawn(seed, mean, n):
    draw = random.Random(seed)
    return [draw.lognormvariate(mean, 0.6) for _ in range(n)]


@given(lengths, lengths)
def test_the_share_is_that_of_all_pairs(one, other):
    pairs = [(a > b) + (a == b) / 2 for a in one for b in other]
    share, z = longer_share(sorted(one), sorted(other))
    assert share == pytest.approx(sum(pairs) / len(pairs))
    assert (z > 0) == (share > 0.5) or share == pytest.approx(0.5)


@pytest.mark.parametrize("factor", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize(
    ("shift", "n_stale", "severity"),
    [(0.0, 60, "ok"), (-1.0, 60, "ok"), (0.2, 60, "ok"), (1.0, 60, "warn"), (1.0, 7, "idle"), (3.0, 8, "warn")],
)
def test_what_is_dropped_is_longer_than_what_is_kept(factor, shift, n_stale, severity):
    """In units of any size: what counts is which of two is longer."""
    found = judged(drawn(1, 5.0, 128), drawn(2, 5.0 + shift, n_stale), factor)
    assert found.severity == severity
    assert not found.grows
    if severity == "warn":
        assert "long answers are sorted out" in found.reason
        assert found.value == judged(drawn(1, 5.0, 128), drawn(2, 5.0 + shift, n_stale)).value


def test_false_alarms_are_rare():
    alarms = sum(judged(drawn(n, 5.0, 128), drawn(-n - 1, 5.0, 20)).severity == "warn" for n in range(400))
    assert alarms <= 2


def test_answers_of_one_length_are_none_longer():
    assert judged([7.0] * 100, [7.0] * 100).value == 0.5
    assert judged([], [1.0] * 100).severity == "idle"


def test_the_monitor_judges_them_with_the_batches_and_never_quarantines():
    monitor = EnvMonitor(HealthConfig())
    for window in range(5):
        for number in range(8):
            refs = [
                GroupRef(group=f"{n:032x}", seq=n + 1, env="e", sequences=4, tokens=400 + n, policy_step=number,
                         advantages=[])
                for n in range(16)
            ]  # fmt: skip
            monitor.record_stale([900, 1000])
            monitor.batch(number, refs)
        result = next(one for one in monitor.judge_batches() if one.check == "stale_lengths")
        assert (result.severity, result.windows, result.value) == ("warn", window + 1, 1.0)
        assert "16 groups were dropped as stale, of 950 tokens a sequence (median), where those trained have 102" in (
            result.reason
        )
    assert monitor.standing.quarantined_from is None
