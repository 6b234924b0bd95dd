"""What a service knows of its telemetry: which groups to trace, on which clock, what its calls cost, and where finished
spans and figures go."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.figures import Figures
from lachesis.pipeline.telemetry.messages import rebuilt, stamp_spans
from lachesis.pipeline.telemetry.performance import Performance
from lachesis.pipeline.telemetry.sampling import Keeper, SamplingReason, is_sampled
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, root_span
from lachesis.schemas.annotations import Stamp

__all__ = ["Sink", "Tracing"]

_MAX_REMEMBERED = 4096
"""Rollouts that ended here, and rollouts delivered twice, that are remembered: a few KiB each."""

T = TypeVar("T")


def _nothing() -> Sequence[Span]:
    return ()


def _merged(stamps: Sequence[Stamp], more: Sequence[Stamp]) -> list[Stamp]:
    return [*stamps, *(stamp for stamp in more if stamp not in stamps)]


@dataclass(slots=True)
class _Ended:
    """A rollout that ended here and is not sampled: what its trace can be rebuilt from, and whether it was."""

    end: RolloutEnd
    stamps: list[Stamp]
    more: Callable[[], Sequence[Span]]
    kept: bool


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
        self._ended: OrderedDict[str, _Ended] = OrderedDict()
        self._redelivered: OrderedDict[str, list[Stamp]] = OrderedDict()

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

    def end(
        self, end: RolloutEnd, stamps: Sequence[Stamp], more: Callable[[], Sequence[Span]] = _nothing
    ) -> SamplingReason | None:
        """End a rollout: export its root, if its trace is kept, and what its stamps tell if nobody exported that.

        Returns why its trace is kept, None if it is not. `more` makes spans of the caller's own that belong to the
        trace. `end.kept` is filled in here.
        """
        if not self.on:
            return None
        stamps = _merged(stamps, self._redelivered.pop(end.group, ()))
        e2e_s = (end.ended_ns - end.started_ns) / 1e9
        reason = self.keeper.reason(end.group, stamps, e2e_s, cause=end.cause, late=end.late)
        if self.sampled(end.group):
            self.emit([root_span(msgspec.structs.replace(end, kept=reason or "ratio")), *more()])
            return reason
        if reason is not None:
            self._emit_rebuilt(end, stamps, more, reason)
        self._remember(self._ended, end.group, _Ended(end, stamps, more, kept=reason is not None))
        return reason

    def redelivered(self, group: str, stamp: Stamp) -> None:
        """Take in that a stage has handled a rollout that was delivered to it before.

        Its trace is kept: when it ends here, or now if it has.
        """
        if not self.on or self.sampled(group):
            return  # the stage exports its spans itself
        ended = self._ended.get(group)
        if ended is None:
            self._remember(self._redelivered, group, _merged(self._redelivered.get(group, ()), [stamp]))
            return
        if stamp in ended.stamps:
            return
        ended.stamps = _merged(ended.stamps, [stamp])
        if ended.kept:
            self.emit(stamp_spans(ended.end, stamp))
        else:
            ended.kept = True
            self.keeper.kept += 1
            self._emit_rebuilt(ended.end, ended.stamps, ended.more, "redelivered")

    def _emit_rebuilt(
        self, end: RolloutEnd, stamps: Sequence[Stamp], more: Callable[[], Sequence[Span]], reason: SamplingReason
    ) -> None:
        self.emit([*rebuilt(msgspec.structs.replace(end, kept=reason), stamps), *more()])

    def _remember(self, memory: OrderedDict[str, T], group: str, what: T) -> None:
        memory[group] = what
        if len(memory) > _MAX_REMEMBERED:
            memory.popitem(last=False)
