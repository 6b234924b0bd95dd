"""Spans of what a stage does for one group: who rates it, which requests it makes.

`recording` opens a recorder for the group that the current task works on; `traced` adds a span to it, anywhere in the
call tree, below the span that is open there. It costs next to nothing if no recorder is open, as for every group that
is not sampled. A request to another service carries `current_traceparent`, so that its spans lie below ours, or so that
it traces nothing (`not_recording`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import count

from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.spans import Attributes, Span, SpanKind, root_id, span_id

__all__ = ["current_traceparent", "not_recording", "recording", "traced"]

Value = str | int | float | bool | list[str]


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Adds spans below `parent`; those below another span have a recorder of their own, and the same list."""

    clock: Clock
    service: str
    trace: str
    parent: str
    spans: list[Span] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)


_CURRENT: ContextVar[_Recorder | None] = ContextVar("recorder", default=None)
_UNSAMPLED: ContextVar[str | None] = ContextVar("unsampled", default=None)


@contextmanager
def recording(clock: Clock, service: str, trace: str, parent: str) -> Iterator[list[Span]]:
    """Record what `traced` sees until the context ends, as children of span `parent`.

    Yields the growing list.
    """
    recorder = _Recorder(clock, service, trace, parent)
    token = _CURRENT.set(recorder)
    try:
        yield recorder.spans
    finally:
        _CURRENT.reset(token)


@contextmanager
def not_recording(group: str) -> Iterator[list[Span]]:
    """Record nothing of a group that is not sampled, and let requests say so. Yields an empty list."""
    token = _UNSAMPLED.set(group)
    try:
        yield []
    finally:
        _UNSAMPLED.reset(token)


def current_traceparent() -> str | None:
    """Return the W3C `traceparent` of the span that is open here, None outside of any group's work."""
    recorder, group = _CURRENT.get(), _UNSAMPLED.get()
    if recorder is not None:
        return f"00-{recorder.trace}-{recorder.parent}-01"
    return None if group is None else f"00-{group}-{root_id(group)}-00"


def traced(
    name: str, kind: SpanKind = "internal", attributes: Attributes | None = None
) -> AbstractContextManager[dict[str, Value]]:
    """Record the time that the context takes as a span.

    Yields a dictionary for attributes that come to be known.
    """
    recorder = _CURRENT.get()
    return nullcontext({}) if recorder is None else _recorded(recorder, name, kind, attributes)


@contextmanager
def _recorded(
    recorder: _Recorder, name: str, kind: SpanKind, attributes: Attributes | None
) -> Iterator[dict[str, Value]]:
    found: dict[str, Value] = {}
    id_ = span_id(recorder.trace, recorder.parent, name, next(recorder.numbers))
    token = _CURRENT.set(replace(recorder, parent=id_))
    start_ns = recorder.clock.now_ns()
    error: str | None = None
    try:
        yield found
    except BaseException as raised:
        error = error_text(raised)[:500]
        found["error.type"] = type(raised).__name__
        raise
    finally:
        _CURRENT.reset(token)
        recorder.spans.append(
            Span(
                service=recorder.service,
                name=name,
                trace=recorder.trace,
                id=id_,
                parent=recorder.parent,
                kind=kind,
                start_ns=start_ns,
                end_ns=recorder.clock.now_ns(),
                attributes={**(attributes or {}), **found},
                error=error,
            )
        )
