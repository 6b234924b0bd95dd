"""Settings of traces and exported metrics."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lachesis.pipeline.common.paths import Address

__all__ = ["TelemetryConfig", "is_disabled"]

_SIGNALS = ("TRACES", "METRICS")


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is exported over OTLP. The standard `OTEL_*` variables go before these settings.

    Nothing is exported until an endpoint is named, here or by OTEL_EXPORTER_OTLP_ENDPOINT.
    """

    endpoint: Address | None = None
    """URL of an OTLP receiver, http://localhost:4317 say. Default None: OTEL_EXPORTER_OTLP_ENDPOINT, or no export."""
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    """How the receiver is spoken to. Default grpc."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of rollouts traced in full. Slow, failed, stale, late and redelivered ones are traced as well. Default
    0.01."""
    slow_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from environment to optimizer step beyond which a rollout is slow. Default None: the p99 of the last 500
    to 1,000 rollouts."""
    close_s: Annotated[float, Meta(ge=0)] = 2.0
    """Seconds that a process waits at its end for its last spans and figures to be delivered. Default 2."""
    perf_window: Annotated[int, Meta(ge=2)] = 200
    """Newest calls of a service that its `api_perf/*` figures are over. Default 200."""
    perf_slow_ms: Annotated[float, Meta(gt=0)] = 5000.0
    """Milliseconds beyond which a call counts as slow. Default 5000."""
    jaeger_url: Address | None = None
    """Base URL of Jaeger's own pages and API, http://localhost:16686 say, for `lachesis top` and `lachesis trace`.
    Default None: slow rollouts are named without a link, and followed in the streams."""

    def wanted(self) -> bool:
        """Return whether anything is to be exported at all."""
        if is_disabled(os.environ):
            return False
        names = ("OTEL_EXPORTER_OTLP_ENDPOINT", *(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT" for signal in _SIGNALS))
        return self.endpoint is not None or any(os.environ.get(name) for name in names)


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Return whether the standard variable OTEL_SDK_DISABLED switches every export off."""
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
