"""Traces weights after the optimizer step that made them: their storage and their loading."""

from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.spans import Span, SpanKind, batch_trace, span_id
from lachesis.schemas.ids import PolicyVersion

__all__ = ["traced_publication", "traced_update"]


@contextmanager
def traced_update(service: Service, trainer: str, version: PolicyVersion) -> Iterator[None]:
    """Export the time that a server's update takes, below the step of `trainer` that made `version`.

    Step 0 has none.
    """
    about = {"rl.policy.version": str(version)}
    with _traced(service, trainer, version.step, "update_weights", kind="client", about=about):
        yield


@contextmanager
def traced_publication(service: Service, trainer: str, step: int) -> Iterator[None]:
    """Export the time from the copy of a step's weights to their announcement. Step 0 has none."""
    with _traced(service, trainer, step, "store_weights", kind="internal", about={}):
        yield


@contextmanager
def _traced(
    service: Service, trainer: str, step: int, name: str, *, kind: SpanKind, about: dict[str, str]
) -> Iterator[None]:
    if not service.tracing.on or step == 0:
        yield
        return
    start_ns, error = service.now_ns(), None
    try:
        yield
    except BaseException as raised:
        error = error_text(raised)[:500]
        raise
    finally:
        trace = batch_trace(service.run, trainer, step - 1)
        attributes: dict[str, str | int] = {"rl.run": service.run, "rl.train.step": step, **about}
        span = Span(
            service=service.name,
            name=name,
            trace=trace,
            id=span_id(trace, name, service.name, service.instance, *about.values()),
            parent=span_id(trace, "train.step"),
            kind=kind,
            start_ns=start_ns,
            end_ns=service.now_ns(),
            attributes=attributes,
            error=error,
        )
        service.tracing.emit([span])
