"""Statistics of a service's newest calls: latency, rates, failures and payload. Pure.

A call is one unit of work that somebody waits for: a group handled by a stage or stored by an environment, a batch
trained, an HTTP request answered by a gateway or an inference server, a request to an inference server.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

__all__ = ["CallRecord", "Performance"]


class CallRecord(NamedTuple):
    """One call: when it ended (seconds, monotonic), how long it took, how many items it carried, whether it failed.

    `payload` is its size in bytes, None where it has none; `plain` the size before packing, where that is known.
    """

    ended_s: float
    seconds: float
    items: int = 1
    failed: bool = False
    payload: int | None = None
    plain: int | None = None


class Performance:
    """Figures over the last `window` calls; a call above `slow_ms` milliseconds counts as slow. Totals are of all."""

    def __init__(self, window: int = 200, slow_ms: float = 5000.0) -> None:
        self._calls: deque[CallRecord] = deque(maxlen=window)
        self._slow_ms = slow_ms
        self._items = self._failed = self._requests = self._slow = 0

    def record(self, call: CallRecord) -> None:
        self._calls.append(call)
        self._requests += 1
        self._items += call.items
        self._failed += call.failed
        self._slow += call.seconds * 1e3 > self._slow_ms

    def figures(self, prefix: str = "api_perf") -> dict[str, float]:
        """Return `api_perf/*`, or the same under another prefix; what has no value yet is left out.

        Rates are per second over the window's span.
        """
        if not self._calls:
            return {}
        ms = np.array([call.seconds for call in self._calls]) * 1e3
        p50, p95, p99 = np.quantile(ms, [0.5, 0.95, 0.99]).tolist()
        found = {
            "latency_p50_ms": p50,
            "latency_p95_ms": p95,
            "latency_p99_ms": p99,
            "latency_mean_ms": float(ms.mean()),
            "latency_min_ms": float(ms.min()),
            "latency_max_ms": float(ms.max()),
            "total_requests": float(self._requests),
            "total_items": float(self._items),
            "failed_requests": float(self._failed),
            "slow_requests": float(self._slow),
            "error_rate": sum(call.failed for call in self._calls) / len(self._calls),
        }
        span = self._calls[-1].ended_s - self._calls[0].ended_s
        if span > 0:  # between the first end and the last: the first call's items came before
            found["requests_per_sec"] = (len(self._calls) - 1) / span
            found["items_per_sec"] = (sum(call.items for call in self._calls) - self._calls[0].items) / span
        payloads = [call.payload for call in self._calls if call.payload is not None]
        if payloads:
            found["mean_payload_bytes"] = float(np.mean(payloads))
        ratios = [call.plain / call.payload for call in self._calls if call.payload and call.plain is not None]
        if ratios:
            found["mean_compression_ratio"] = float(np.mean(ratios))
        return {f"{prefix}/{name}": value for name, value in found.items()}
