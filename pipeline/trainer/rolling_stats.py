"""Latencies and rates over the newest batches, since one batch is too small a sample. Pure."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.annotations import Stamp

__all__ = ["BatchTimings", "RollingTrainingStats", "durations"]


class BatchTimings(NamedTuple):
    """One batch once it is trained. Stamps and start times are by group; times Unix ns."""

    stamps: Mapping[str, Sequence[Stamp]]
    started_ns: Mapping[str, int]
    trained_ns: int
    sequences: int
    tokens: int


def durations(batch: BatchTimings) -> Iterator[tuple[str, float]]:
    """Yield name and seconds of each latency of every group of a batch.

    The names are `latency/{stage}/wait`, `latency/{stage}/proc` and `latency/e2e`.
    """
    for group_stamps in batch.stamps.values():
        for stamp in group_stamps:
            yield f"latency/{stamp.stage}/wait", (stamp.start_ns - stamp.stored_ns) / 1e9
            yield f"latency/{stamp.stage}/proc", (stamp.end_ns - stamp.start_ns) / 1e9
    for started in batch.started_ns.values():
        yield "latency/e2e", (batch.trained_ns - started) / 1e9


class RollingTrainingStats:
    """The newest `window` batches; a batch that leaves takes its counts along."""

    def __init__(self, window: int = 50) -> None:
        self._batches: deque[tuple[BatchTimings, dict[str, Histogram]]] = deque(maxlen=window)

    def record_batch(self, batch: BatchTimings) -> None:
        histograms: defaultdict[str, Histogram] = defaultdict(Histogram)
        for name, seconds in durations(batch):
            histograms[name].record(seconds)
        self._batches.append((batch._replace(stamps={}), dict(histograms)))

    def figures(self) -> dict[str, float]:
        """Return rolling latencies within 1.1 %, and rates a second between the first and last batch.

        Their names are `latency/**/rolling_p*` and `throughput/*`.
        """
        merged: defaultdict[str, Histogram] = defaultdict(Histogram)
        for _, histograms in self._batches:
            for name, histogram in histograms.items():
                merged[name].merge(histogram)
        found = {}
        for name, histogram in merged.items():
            for label, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                value = histogram.quantile(q)
                if value is not None:
                    found[f"{name}/rolling_{label}"] = value
        later = list(self._batches)[1:]
        if not later:
            return found
        seconds = (later[-1][0].trained_ns - self._batches[0][0].trained_ns) / 1e9
        if seconds <= 0:
            return found
        found["throughput/groups_per_s"] = sum(len(batch.started_ns) for batch, _ in later) / seconds
        found["throughput/sequences_per_s"] = sum(batch.sequences for batch, _ in later) / seconds
        found["throughput/tokens_per_s"] = sum(batch.tokens for batch, _ in later) / seconds
        handled: defaultdict[str, int] = defaultdict(int)
        for _, histograms in later:
            for name, histogram in histograms.items():
                if name.endswith("/proc"):
                    handled[name.split("/")[1]] += histogram.count
        return found | {f"throughput/{stage}/items_per_s": count / seconds for stage, count in handled.items()}
