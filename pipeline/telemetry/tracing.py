"""What a service knows of its telemetry: which groups to trace, on which clock, what its calls cost, and where finished
spans and figures go."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec

from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import Figures
from lachesis.pipeline.telemetry.messages import rebuilt
from lachesis.pipeline.telemetry.performance import Performance
from lachesis.pipeline.telemetry.sampling import Keeper, is_sampled
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, root_span
from lachesis.schemas.annotations import Stamp

__all__ = ["Sink", "Tracing"]


class Sink(Protocol):
    """Where telemetry goes; see `Otlp`. Neither call waits."""

    dropped: int

    @property
    def traces(self) -> bool: ...
    def emit(self, spans: Sequence[Span]) -> None: ...
    def observe(self, figures: Figures) -> None: ...


class Tracing:
    """Without a sink nothing is sampled, so a stage that asks first does no work for traces."""

    def __init__(self, config: TelemetryConfig | None = None, sink: Sink | None = None) -> None:
        config = config or TelemetryConfig()
        self.clock = Clock()
        self.performance: dict[str, Performance] = defaultdict(
            lambda: Performance(config.perf_window, config.perf_slow_ms)
        )
        """What calls cost, by the prefix of the figures."""
        self.sink = sink
        self.on = sink is not None and sink.traces
        self._ratio = config.ratio if self.on else 0.0
        self.keeper = Keeper(self._ratio, config.slow_s)

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
            if self.keeper.kept_ratio is not None:
                found["trace/kept_ratio"] = self.keeper.kept_ratio
        return found

    def end(self, end: RolloutEnd, stamps: Sequence[Stamp], more: Sequence[Span] = ()) -> bool:
        """End a rollout: export its root, if its trace is kept, and what its stamps tell if nobody exported that.

        Returns whether its trace is kept. `more` are spans of the caller's own that belong to the trace. `end.kept` is
        filled in here.
        """
        if not self.on:
            return False
        e2e_s = (end.ended_ns - end.started_ns) / 1e9
        reason = self.keeper.reason(end.group, stamps, e2e_s, failed=end.outcome == "dead_letter")
        if reason is None:
            return False
        end = msgspec.structs.replace(end, kept=reason)
        self.emit([*([root_span(end)] if reason == "ratio" else rebuilt(end, stamps)), *more])
        return True
