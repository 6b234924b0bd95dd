"""Runs a service's telemetry: groups to trace, the clock, call statistics, and the export of spans.

Finished spans and figures go to one sink.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import msgspec

from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.messages import rebuild_trace, stamp_spans
from lachesis.pipeline.telemetry.performance import Performance
from lachesis.pipeline.telemetry.sampling import SamplingReason, TraceSampler, is_sampled
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, root_span
from lachesis.schemas.annotations import Stamp

__all__ = ["TelemetrySink", "TraceIncident", "Tracing"]

_MAX_REMEMBERED = 4096
"""Rollouts that ended here, and rollouts with incidents, that are remembered: a few KiB each."""
_MAX_INCIDENTS = 16
"""Incidents that are remembered of one rollout, the newest."""
_MAX_ERROR = 500
"""Characters of an error."""

T = TypeVar("T")


def _nothing() -> Sequence[Span]:
    return ()


class TraceIncident(NamedTuple):
    """That a stage has handled a rollout again, or has given it up because of an error."""

    stamp: Stamp
    error_type: str | None = None
    error: str | None = None

    @classmethod
    def of(cls, stamp: Stamp, error: BaseException) -> Self:
        """Return that `error` ended the work of `stamp`."""
        return cls(stamp, type(error).__name__, str(error)[:_MAX_ERROR])

    @property
    def failure(self) -> tuple[str, str] | None:
        """The type and the text of the error, None where there was none."""
        return None if self.error_type is None else (self.error_type, self.error or "")


@dataclass(slots=True)
class _RolloutEndRecord:
    """A rollout that ended here and is not sampled: what its trace can be rebuilt from, and whether it was."""

    end: RolloutEnd
    stamps: Sequence[Stamp]
    incidents: list[TraceIncident]
    more: Callable[[], Sequence[Span]]
    kept: bool

    def is_missing(self, incident: TraceIncident) -> bool:
        """Return whether the trace does not hold the incident yet."""
        return incident not in self.incidents and incident.stamp not in self.stamps

    def spans(self, reason: SamplingReason) -> list[Span]:
        """Return the whole trace."""
        end = msgspec.structs.replace(self.end, kept=reason)
        again = [one.stamp for one in self.incidents if one.failure is None and one.stamp not in self.stamps]
        failed = [span for one in self.incidents if one.failure is not None
                  for span in stamp_spans(end, one.stamp, one.failure)]  # fmt: skip
        return [*rebuild_trace(end, [*self.stamps, *again]), *failed, *self.more()]


class TelemetrySink(Protocol):
    """Where telemetry goes; see `OtlpExporter`. Neither call waits."""

    dropped: int

    @property
    def problem(self) -> str | None: ...
    @property
    def traces(self) -> bool: ...
    def emit(self, spans: Sequence[Span]) -> None: ...
    def observe(self, figures: ServiceFigures) -> None: ...


class Tracing:
    """Without a sink nothing is sampled, so a stage that asks first does no work for traces."""

    def __init__(self, config: TelemetryConfig | None = None, sink: TelemetrySink | None = None) -> None:
        config = config or TelemetryConfig()
        self.clock = Clock()
        self.performance: dict[str, Performance] = defaultdict(
            lambda: Performance(config.perf_window, config.perf_slow_ms)
        )
        """What calls cost, by the prefix of the figures."""
        self.sink = sink
        self.on = sink is not None and sink.traces
        self._ratio = config.ratio if self.on else 0.0
        self.keeper = TraceSampler(self._ratio, config.slow_s)
        self._ended: OrderedDict[str, _RolloutEndRecord] = OrderedDict()
        self._incidents: OrderedDict[str, list[TraceIncident]] = OrderedDict()

    def sampled(self, group: str) -> bool:
        """Return whether the stages export spans of this group on the way."""
        return self.on and is_sampled(group, self._ratio)

    def emit(self, spans: Sequence[Span]) -> None:
        """Hand finished spans over."""
        if self.sink is not None:
            self.sink.emit(spans)

    def figures(self) -> dict[str, float]:
        """Return `api_perf/*`, and where traces are exported `trace/*`: the share kept, and spans dropped."""
        found: dict[str, float] = {}
        for prefix, performance in self.performance.items():
            found |= performance.figures(prefix)
        if self.sink is not None and self.on:
            found["trace/dropped_spans"] = float(self.sink.dropped)
            if self.keeper.sampled_ratio is not None:
                found["trace/kept_ratio"] = self.keeper.sampled_ratio
        return found

    def end(
        self, end: RolloutEnd, stamps: Sequence[Stamp], more: Callable[[], Sequence[Span]] = _nothing
    ) -> SamplingReason | None:
        """End a rollout: export its root span if its trace is kept.

        The spans that its stamps describe are exported too, unless they were exported before.

        Returns why its trace is kept, None if it is not. `more` makes spans of the caller's own that belong to the
        trace. `end.kept` is filled in here.
        """
        if not self.on:
            return None
        ended = _RolloutEndRecord(end, stamps, self._incidents.pop(end.group, []), more, kept=False)
        failed = any(one.failure is not None for one in ended.incidents)
        reason = self.keeper.reason(
            end.group,
            [*stamps, *(one.stamp for one in ended.incidents)],
            (end.ended_ns - end.started_ns) / 1e9,
            cause="dead" if failed else end.cause,
            late=end.late,
        )
        if self.sampled(end.group):
            self.emit([root_span(msgspec.structs.replace(end, kept=reason or "ratio")), *more()])
            return reason
        if reason is not None:
            ended.kept = True
            self.emit(ended.spans(reason))
        self._remember(self._ended, end.group, ended)
        return reason

    def record_incident(self, group: str, incident: TraceIncident) -> None:
        """Take in what a stage says of a rollout. Its trace is kept: when it ends here, or now if it has."""
        if not self.on or self.sampled(group):
            return  # the stage exports its spans itself
        ended = self._ended.get(group)
        if ended is None:
            self._remember(self._incidents, group, [*self._incidents.get(group, []), incident][-_MAX_INCIDENTS:])
        elif ended.is_missing(incident):
            ended.incidents = [*ended.incidents, incident][-_MAX_INCIDENTS:]
            if ended.kept:
                self.emit(stamp_spans(ended.end, incident.stamp, incident.failure))
            else:
                ended.kept = True
                self.keeper.kept += 1
                self.emit(ended.spans("redelivered" if incident.failure is None else "failed"))

    def _remember(self, memory: OrderedDict[str, T], group: str, what: T) -> None:
        memory[group] = what
        if len(memory) > _MAX_REMEMBERED:
            memory.popitem(last=False)
