"""Loading weights into an inference server, as a span of the optimizer step that made them."""

from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.spans import Span, batch_trace, span_id
from lachesis.schemas.ids import PolicyVersion

__all__ = ["traced_update"]


@contextmanager
def traced_update(service: Service, trainer: str, version: PolicyVersion) -> Iterator[None]:
    """Export the time that the context takes, below the step of `trainer` that made `version`.

    Step 0 has none.
    """
    if not service.tracing.on or version.step == 0:
        yield
        return
    start_ns, error = service.now_ns(), None
    try:
        yield
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"[:500]
        raise
    finally:
        trace = batch_trace(service.run, trainer, version.step - 1)
        about: dict[str, str | int] = {
            "rl.run": service.run,
            "rl.train.step": version.step,
            "rl.policy.version": str(version),
        }
        span = Span(
            service=service.name,
            name="update_weights",
            trace=trace,
            id=span_id(trace, "update_weights", service.name, service.instance, version),
            parent=span_id(trace, "train.step"),
            kind="client",
            start_ns=start_ns,
            end_ns=service.now_ns(),
            attributes=about,
            error=error,
        )
        service.tracing.emit([span])
