"""Spans of what a stage does for one group: who rates it, which requests it makes.

`recording` opens a recorder for the group that the present task works on; `traced` adds a span to it, wherever in the
call tree, and costs next to nothing when no recorder is open, which is so for every group that is not sampled.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.spans import Attributes, Span, SpanKind, span_id

__all__ = ["recording", "traced"]

Value = str | int | float | bool | list[str]


class _Recorder:
    def __init__(self, clock: Clock, service: str, trace: str, parent: str) -> None:
        self.clock = clock
        self.service = service
        self.trace = trace
        self.parent = parent
        self.spans: list[Span] = []


_CURRENT: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(clock: Clock, service: str, trace: str, parent: str) -> Iterator[list[Span]]:
    """Record what `traced` sees until the context ends, as children of span `parent`; yields the growing list."""
    recorder = _Recorder(clock, service, trace, parent)
    token = _CURRENT.set(recorder)
    try:
        yield recorder.spans
    finally:
        _CURRENT.reset(token)


def traced(
    name: str, kind: SpanKind = "internal", attributes: Attributes | None = None
) -> AbstractContextManager[dict[str, Value]]:
    """Record the time that the context takes as a span. Yields a dictionary for attributes that come to be known."""
    recorder = _CURRENT.get()
    return nullcontext({}) if recorder is None else _recorded(recorder, name, kind, attributes)


@contextmanager
def _recorded(
    recorder: _Recorder, name: str, kind: SpanKind, attributes: Attributes | None
) -> Iterator[dict[str, Value]]:
    found: dict[str, Value] = {}
    start_ns = recorder.clock.now_ns()
    error: str | None = None
    try:
        yield found
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"[:500]
        found["error.type"] = type(raised).__name__
        raise
    finally:
        recorder.spans.append(
            Span(
                service=recorder.service,
                name=name,
                trace=recorder.trace,
                id=span_id(recorder.trace, recorder.parent, name, len(recorder.spans)),
                parent=recorder.parent,
                kind=kind,
                start_ns=start_ns,
                end_ns=recorder.clock.now_ns(),
                attributes={**(attributes or {}), **found},
                error=error,
            )
        )
