"""Exports spans of the groups that a replica of a stateless stage handles, under each group's trace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from lachesis.pipeline.bus.api import Delivery, PubAck
from lachesis.pipeline.runtime.incidents import announce_incident
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.messages import delivery_attributes, process_id, publish_span, stage_spans
from lachesis.pipeline.telemetry.recorder import not_recording, recording
from lachesis.pipeline.telemetry.spans import Span, Times, root_id
from lachesis.pipeline.telemetry.tracing import TraceIncident
from lachesis.schemas.annotations import DeadLetter, Stamp

__all__ = ["StageTraces"]


class StageTraces:
    """`durable` is the consumer that the replicas share. Nothing is exported where no traces are."""

    def __init__(self, service: Service, durable: str) -> None:
        self._service = service
        self._durable = durable
        self._failed: set[int] = set()  # sequences of held groups whose failure is exported already

    @contextmanager
    def recording(self, delivery: Delivery, group: str, start_ns: int) -> Iterator[list[Span]]:
        """Record what is done for a sampled group, and yield the growing list.

        If an exception ends the work, it is exported with it: other services may have spans below these.
        """
        service, tracing = self._service, self._service.tracing
        if not tracing.sampled(group):
            with not_recording(group) if tracing.on else nullcontext():
                yield []
            return
        parent = process_id(group, service.name, delivery.attempt)
        with recording(tracing.clock, service.name, group, parent) as children:
            try:
                yield children
            except BaseException as error:
                self._export_failure(delivery, group, start_ns, error, children=children)
                self._failed.add(delivery.message.seq)
                raise

    def work_spans(self, delivery: Delivery, group: str, stamp: Stamp, children: Sequence[Span]) -> list[Span]:
        """Return the spans of work that is done; none of a group that is not sampled."""
        if not self._service.tracing.sampled(group):
            return []
        taken = delivery_attributes(delivery.message.seq, self._durable)
        server, subject = self._service.bus.server, delivery.message.subject
        return stage_spans(group, stamp, subject, taken, server=server, children=children)

    def export_work(
        self, group: str, attempt: int, spans: Sequence[Span], ack: PubAck, *, subject: str, times: Times, size: int
    ) -> None:
        """Export a sampled group's work, now that its annotation is stored."""
        service = self._service
        parent = process_id(group, service.name, attempt)
        message, server = f"{ack.stream}:{ack.seq}", service.bus.server
        stored = publish_span(service.name, group, parent, subject, times, server=server, message=message, size=size)
        service.tracing.emit([*spans, stored])

    async def report_dead_letter(
        self,
        delivery: Delivery,
        letter: DeadLetter,
        error: BaseException,
        start_ns: int,
        *,
        worked: Sequence[Span] = (),
    ) -> None:
        """Record work that ended in a dead letter: no stamp does, and traces of dead groups are always kept.

        `worked`: the spans of work that was done until then.
        """
        tracing, group = self._service.tracing, letter.group
        if group is None or delivery.message.seq in self._failed:
            return
        if tracing.sampled(group):
            children = [span for span in worked if span.parent != root_id(group)]
            self._export_failure(delivery, group, start_ns, error, children=children)
        elif letter.ends_rollout:
            stamp = self._stamp(delivery, start_ns)
            await announce_incident(self._service, group, TraceIncident.of(stamp, error))

    def forget(self, seq: int) -> None:
        """Forget a group that is not held any more."""
        self._failed.discard(seq)

    def _export_failure(
        self, delivery: Delivery, group: str, start_ns: int, error: BaseException, *, children: Sequence[Span] = ()
    ) -> None:
        service, message = self._service, delivery.message
        stamp = self._stamp(delivery, start_ns)
        taken, server = delivery_attributes(message.seq, self._durable), service.bus.server
        spans = stage_spans(group, stamp, message.subject, taken, server=server, children=children, error=error)
        service.tracing.emit(spans)

    def _stamp(self, delivery: Delivery, start_ns: int) -> Stamp:
        """Return the times of work that ends now."""
        return Stamp(self._service.name, delivery.message.time_ns, start_ns, self._service.now_ns(), delivery.attempt)
