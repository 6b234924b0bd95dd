"""What calls cost."""

import numpy as np
import pytest

from lachesis.pipeline.telemetry.performance import CallRecord, Performance


def test_figures_are_exact_over_the_window() -> None:
    rng = np.random.default_rng(0)
    seconds = rng.exponential(0.1, 500)
    performance = Performance(window=200)
    for i, value in enumerate(seconds):
        performance.record(CallRecord(i * 0.5, float(value), items=8, failed=i % 10 == 0, payload=100, plain=250))
    figures = performance.figures()
    newest = seconds[-200:] * 1e3
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert figures[f"api_perf/latency_{name}_ms"] == pytest.approx(np.quantile(newest, q))
    assert figures["api_perf/latency_mean_ms"] == pytest.approx(newest.mean())
    assert figures["api_perf/latency_min_ms"] == pytest.approx(newest.min())
    assert figures["api_perf/latency_max_ms"] == pytest.approx(newest.max())
    assert figures["api_perf/requests_per_sec"] == pytest.approx(2.0)
    assert figures["api_perf/items_per_sec"] == pytest.approx(16.0)
    assert figures["api_perf/total_requests"] == 500
    assert figures["api_perf/total_items"] == 4000
    assert figures["api_perf/failed_requests"] == 50
    assert figures["api_perf/error_rate"] == pytest.approx(0.1)
    assert figures["api_perf/mean_payload_bytes"] == 100
    assert figures["api_perf/mean_compression_ratio"] == pytest.approx(2.5)


def test_nothing_measured_is_nothing_said() -> None:
    assert Performance().figures() == {}
    performance = Performance()
    performance.record(CallRecord(1.0, 0.2))
    figures = performance.figures()
    assert "api_perf/requests_per_sec" not in figures
    assert "api_perf/mean_payload_bytes" not in figures


def test_slow_calls_are_counted_by_the_limit() -> None:
    performance = Performance(slow_ms=100.0)
    for seconds in (0.05, 0.1, 0.11, 3.0):
        performance.record(CallRecord(0.0, seconds))
    assert performance.figures()["api_perf/slow_requests"] == 2
