"""A service's figures as OpenTelemetry metrics. Pure: figures in, data points out.

The histograms are exported as what they are, exponential ones of scale 5, so that a collector can add those of several
processes. Counts are cumulative since the service started, so a lost export loses nothing for good.
"""

from collections.abc import Sequence

from opentelemetry.sdk.metrics import Exemplar as OTelExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Buckets,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from lachesis.pipeline.telemetry.figures import Exemplar, ServiceFigures
from lachesis.pipeline.telemetry.histogram import SCALE
from lachesis.pipeline.telemetry.metric_names import metric_name
from lachesis.pipeline.telemetry.spans import root_id
from lachesis.schemas.control import PackedHistogram

__all__ = ["metrics_data"]

_COUNTERS = {
    "handled": "Groups handled.",
    "emitted": "Groups whose output is stored.",
    "redelivered": "Deliveries that were not a message's first.",
    "retried": "Attempts repeated because infrastructure failed.",
    "given_back": "Deliveries put off because infrastructure failed for long.",
    "dead": "Dead letters written.",
}
_GAUGES = {"in_flight": "Groups held.", "lag": "Messages that wait for the service."}


def metrics_data(figures: ServiceFigures, resource: Resource, scope: InstrumentationScope) -> MetricsData:
    """Return everything known of one service as `lachesis.*` metrics."""
    stage = figures.stage
    metrics = [
        _histogram(
            "lachesis.stage.wait", "From stored to start of handling.", stage.wait, figures.wait_exemplars, figures
        ),
        _histogram(
            "lachesis.stage.process",
            "From start of handling to done.",
            stage.process,
            figures.process_exemplars,
            figures,
        ),
    ]
    for name, about in _COUNTERS.items():
        point = _number(getattr(stage, name), figures, since=figures.started_ns)
        total = Sum([point], AggregationTemporality.CUMULATIVE, is_monotonic=True)
        metrics.append(Metric(f"lachesis.stage.{name}", about, "{group}", total))
    for name, about in _GAUGES.items():
        value = getattr(stage, name)
        if value is not None:
            metrics.append(Metric(f"lachesis.stage.{name}", about, "{message}", Gauge([_number(value, figures)])))
    metrics += _gauges(figures)
    scoped = ScopeMetrics(scope, [metric for metric in metrics if metric is not None], "")
    return MetricsData([ResourceMetrics(resource, [scoped], "")])


def _gauges(figures: ServiceFigures) -> list[Metric]:
    """Return the figures of the heartbeat: one metric a name, a point for each environment, rater or stream."""
    units: dict[str, str] = {}
    points: dict[str, list[NumberDataPoint]] = {}
    for figure, value in figures.metrics.items():
        name, attributes, unit = metric_name(figure)
        units[name] = unit
        points.setdefault(name, []).append(NumberDataPoint(attributes, 0, figures.now_ns, value))
    return [Metric(name, "", units[name], Gauge(found)) for name, found in points.items()]


def _number(value: float, figures: ServiceFigures, *, since: int = 0) -> NumberDataPoint:
    return NumberDataPoint({}, since, figures.now_ns, value)


def _histogram(
    name: str, about: str, packed: PackedHistogram | None, exemplars: Sequence[Exemplar], figures: ServiceFigures
) -> Metric | None:
    if packed is None or not packed.count:
        return None
    offset = packed.indexes[0] if packed.indexes else 0
    counts = [0] * (packed.indexes[-1] - offset + 1 if packed.indexes else 0)
    for index, count in zip(packed.indexes, packed.counts, strict=True):
        counts[index - offset] = count
    point = ExponentialHistogramDataPoint(
        attributes={},
        start_time_unix_nano=figures.started_ns,
        time_unix_nano=figures.now_ns,
        count=packed.count,
        sum=packed.total,
        scale=SCALE,
        zero_count=packed.zeros,
        positive=Buckets(offset, counts),
        negative=Buckets(0, []),
        flags=0,
        min=packed.low,
        max=packed.high,
        exemplars=[
            OTelExemplar({}, value, time_ns, span_id=int(root_id(trace), 16), trace_id=int(trace, 16))
            for value, trace, time_ns in exemplars
        ],
    )
    return Metric(name, about, "s", ExponentialHistogram([point], AggregationTemporality.CUMULATIVE))
