"""Spans and metrics to an OTLP receiver, over gRPC or HTTP, by OpenTelemetry's own exporters.

Everything that can block runs in one daemon thread. Guarantees: handing something over never waits; spans that find no
room, or cannot be delivered, are counted and forgotten; closing takes `close_s` seconds at most, whatever the receiver
does.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link as OTelLink
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.endpoints import GRPC, HTTP, OtlpEndpoint, otlp_endpoints
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.metrics import metrics_data
from lachesis.pipeline.telemetry.spans import Span
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import service_name

__all__ = ["OtlpExporter", "open_otlp"]

log = logging.getLogger("lachesis")

SCOPE = InstrumentationScope("lachesis")
_KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "consumer": SpanKind.CONSUMER,
}
_LATE_S = 7.0
"""Seconds after which an export that is under way is reported: it takes milliseconds."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OF_THE_PROCESS = {"service.instance.id", "host.name", "host.id", "rl.env.name"}
"""What does not hold of another service whose spans are rebuilt here."""


class OtlpExporter:
    """The queue and its thread. `resource` has what all of this process's telemetry says of where it comes from."""

    def __init__(
        self,
        resource: Mapping[str, str],
        spans: SpanExporter | None,
        metrics: MetricExporter | None,
        close_s: float = 2.0,
    ) -> None:
        self._attributes = dict(resource)
        self._resources: dict[str, Resource] = {}
        self._spans = spans
        self._metrics = metrics
        self._figures: ServiceFigures | None = None
        self._queue: deque[Span] = deque()
        self._room = _number("OTEL_BSP_MAX_QUEUE_SIZE", 16384)
        self._batch = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)
        self._delay_s = _number("OTEL_BSP_SCHEDULE_DELAY", 1000) / 1e3
        self._close_s = close_s
        self._interval_s = _number("OTEL_METRIC_EXPORT_INTERVAL", 10_000) / 1e3
        self._due = threading.Event()
        self._closing = self._given_up = False
        self.exported = 0
        self.dropped = 0
        self._began_s: float | None = None  # the export that is under way
        self._failed = {"traces": False, "metrics": False}  # by what was exported, whether it failed the last time
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    @property
    def traces(self) -> bool:
        """Whether spans are wanted at all."""
        return self._spans is not None

    @property
    def problem(self) -> str | None:
        """Text about a receiver that takes nothing, or not in time; None: it takes all."""
        failed = [what for what, has_failed in self._failed.items() if has_failed]
        began_s = self._began_s
        age_s = 0.0 if began_s is None else time.monotonic() - began_s
        if not failed and age_s < _LATE_S:
            return None
        how = f"has not answered for {age_s:.0f} s" if age_s >= _LATE_S else "does not answer, or refuses them"
        lost = f"; {self.dropped} spans of {self.dropped + self.exported} are lost so far" if self.dropped else ""
        return f"the OTLP receiver takes no {' and no '.join(failed) or 'telemetry'}: it {how}{lost}"

    @property
    def pending(self) -> int:
        """Spans that are not handed to the exporter yet."""
        return len(self._queue)

    def emit(self, spans: Sequence[Span]) -> None:
        """Hand spans over, without waiting."""
        if self._spans is None:
            return
        taken = spans[: max(0, self._room - len(self._queue))]
        self._queue.extend(taken)
        self.dropped += len(spans) - len(taken)
        if len(self._queue) >= self._batch:
            self._due.set()

    def observe(self, figures: ServiceFigures) -> None:
        """Replace the figures that are exported from now on."""
        self._figures = figures

    def close(self) -> None:
        """Deliver what is left, for `close_s` seconds at most.

        What is left then is dropped, and the log says so.
        """
        self._closing = True
        self._due.set()
        self._thread.join(self._close_s)
        self._given_up = True
        self.dropped += len(self._queue)
        for exporter in (self._spans, self._metrics):  # a thread that waits to try again ends now
            if exporter is not None:
                exporter.shutdown()
        if self.dropped:
            log.warning(
                "%d spans were dropped, %d exported: the receiver was too slow or away, or refused them (lines above; "
                "`lachesis doctor` tries it)",
                self.dropped,
                self.exported,
            )

    def _work(self) -> None:
        next_metrics = time.monotonic() + self._interval_s
        while not self._closing:
            self._due.wait(self._delay_s)
            self._due.clear()
            self._export_spans()
            if time.monotonic() >= next_metrics:
                self._export_metrics()
                next_metrics = time.monotonic() + self._interval_s
        self._export_spans()
        self._export_metrics()

    def _export_spans(self) -> None:
        while self._spans is not None and self._queue and not self._given_up:
            taken = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
            with self._exporting("traces"):
                result = self._spans.export([self._readable(span) for span in taken])
                self._failed["traces"] = result is not SpanExportResult.SUCCESS
            done = not self._failed["traces"]
            self.exported += len(taken) * done
            self.dropped += len(taken) * (not done)

    def _export_metrics(self) -> None:
        # counts are since the start: those of an export that fails are not lost for good
        if self._metrics is not None and self._figures is not None and not self._given_up:
            with self._exporting("metrics"):
                data = metrics_data(self._figures, self._resource(self._attributes["service.name"]), SCOPE)
                self._failed["metrics"] = self._metrics.export(data) is not MetricExportResult.SUCCESS

    @contextmanager
    def _exporting(self, what: str) -> Iterator[None]:
        """Note an export that is under way. One that cannot be encoded has failed, and does not end the thread."""
        self._began_s = time.monotonic()
        try:
            yield
        except Exception:
            log.exception("%s cannot be exported", what)
            self._failed[what] = True
        finally:
            self._began_s = None

    def _resource(self, service: str) -> Resource:
        if service not in self._resources:
            resource = Resource.create({**self._attributes, "service.name": service})
            if service != self._attributes["service.name"]:
                about = {name: value for name, value in resource.attributes.items() if name not in _OF_THE_PROCESS}
                resource = Resource(about)
            self._resources[service] = resource
        return self._resources[service]

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace, span.id),
            parent=_context(span.trace, span.parent) if span.parent else None,
            resource=self._resource(service_name(span.service)),
            attributes=dict(span.attributes),
            links=[OTelLink(_context(link.trace, link.span)) for link in span.links],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=max(span.end_ns, span.start_ns + 1),  # Jaeger calls a duration of 0 negative
            instrumentation_scope=SCOPE,
        )


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=_SAMPLED)


def open_otlp(config: TelemetryConfig, resource: Mapping[str, str]) -> OtlpExporter | None:
    """Return the exporter that settings and `OTEL_*` variables ask for, None if they ask for none.

    Raises `ConfigError` on a protocol or an exporter that is not known.
    """
    by_signal = {one.signal: one for one in otlp_endpoints(config)}
    spans = _span_exporter(by_signal["TRACES"]) if "TRACES" in by_signal else None
    metrics = _metric_exporter(by_signal["METRICS"]) if "METRICS" in by_signal else None
    return OtlpExporter(resource, spans, metrics, config.close_s) if spans or metrics else None


def _given(endpoint: OtlpEndpoint) -> str | None:
    """Return the endpoint to hand to an exporter: None where a variable names it, which exporters read alone."""
    if endpoint.source != "telemetry.endpoint":
        return None
    return endpoint.url if endpoint.protocol == HTTP else endpoint.address


def _span_exporter(endpoint: OtlpEndpoint) -> SpanExporter:
    if endpoint.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=_given(endpoint))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HTTPSpanExporter

    return HTTPSpanExporter(endpoint=_given(endpoint))


def _metric_exporter(endpoint: OtlpEndpoint) -> MetricExporter:
    if endpoint.protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        return OTLPMetricExporter(endpoint=_given(endpoint))
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HTTPMetricExporter

    return HTTPMetricExporter(endpoint=_given(endpoint))


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ConfigError(f"{variable} is {text!r}; it must be a positive whole number")
    return int(text)
