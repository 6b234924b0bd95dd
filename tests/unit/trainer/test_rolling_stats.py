"""Latencies and rates of a batch and of the newest batches."""

import numpy as np
import pytest

from lachesis.pipeline.trainer.metrics import latencies
from lachesis.pipeline.trainer.rolling_stats import BatchTimings, RollingTrainingStats
from lachesis.schemas.annotations import Stamp

S = 1_000_000_000


def a_batch(number: int, rng: np.random.Generator, groups: int = 16) -> BatchTimings:
    waits, works = rng.exponential(0.2, groups), rng.exponential(0.05, groups)
    start = number * S
    names = [f"{number}-{i}" for i in range(groups)]
    stamps = {
        name: [Stamp("scorer", start, start + int(wait * S), start + int((wait + work) * S))]
        for name, wait, work in zip(names, waits, works, strict=True)
    }
    return BatchTimings(stamps, dict.fromkeys(names, start - S), start + 2 * S, groups * 8, groups * 80)


def test_a_batchs_quantiles_are_exact() -> None:
    batch = a_batch(5, np.random.default_rng(0))
    waits = [(stamps[0].start_ns - stamps[0].stored_ns) / S for stamps in batch.stamps.values()]
    found = latencies(batch)
    assert found["latency/scorer/wait/p95"] == pytest.approx(np.quantile(waits, 0.95))
    assert found["latency/e2e/p50"] == pytest.approx(3.0)


def test_the_rolling_quantiles_are_those_of_the_newest_batches_alone() -> None:
    rng = np.random.default_rng(1)
    batches = [a_batch(number, rng) for number in range(30)]
    rolling = RollingTrainingStats(window=10)
    for batch in batches:
        rolling.record_batch(batch)
    newest = [
        (stamps[0].end_ns - stamps[0].start_ns) / S for batch in batches[-10:] for stamps in batch.stamps.values()
    ]
    found = rolling.figures()
    for label, q in (("p50", 0.5), ("p99", 0.99)):
        exact = np.quantile(newest, q, method="inverted_cdf")
        assert found[f"latency/scorer/proc/rolling_{label}"] == pytest.approx(exact, rel=0.011)
    assert found["throughput/groups_per_s"] == pytest.approx(16.0)
    assert found["throughput/tokens_per_s"] == pytest.approx(1280.0)
    assert found["throughput/scorer/items_per_s"] == pytest.approx(16.0)


def test_one_batch_has_no_rate() -> None:
    rolling = RollingTrainingStats()
    rolling.record_batch(a_batch(0, np.random.default_rng(2)))
    assert not [name for name in rolling.figures() if name.startswith("throughput/")]
    assert RollingTrainingStats().figures() == {}
