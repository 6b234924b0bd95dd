"""Makes spans of messages: waiting for one, working on it, storing one. Pure.

They follow OpenTelemetry's conventions for messaging.

Every stage adds a wait and its work to the trace of a group, whether it exports them on the way or they are rebuilt
from its stamps at the end. NATS has no conventions of its own: a message is named `{stream}:{sequence}`, the consumer
group is the durable consumer.
"""

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from lachesis.pipeline.telemetry.spans import (
    GAP_NS,
    Attributes,
    RolloutEnd,
    Server,
    Span,
    SpanLink,
    Times,
    generate_span,
    root_id,
    root_span,
    span_id,
)
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.catalog import channel_of

__all__ = [
    "consume_spans",
    "delivery_attributes",
    "message_name",
    "process_id",
    "publish_attributes",
    "publish_span",
    "rebuild_trace",
    "stage_spans",
    "stage_subject",
    "stamp_spans",
]

_NAMED = {"{run}": "rl.run", "{env}": "rl.env.name"}
"""What a name in a subject is as an attribute."""


def stage_spans(
    group: str,
    stamp: Stamp,
    subject: str,
    attributes: Attributes | None = None,
    *,
    server: Server | None = None,
    children: Iterable[Span] = (),
    error: BaseException | None = None,
) -> list[Span]:
    """Return the wait and the work of one stage on one group, with the work's own children.

    `error` ended the work.
    """
    wait_s = max(0, stamp.start_ns - stamp.stored_ns) / 1e9
    waited = _wait_spans(
        stamp.stage, group, span_id(group, "wait", stamp.stage, stamp.attempt), subject,
        (stamp.stored_ns, stamp.start_ns),
    )  # fmt: skip
    worked = Span(
        service=stamp.stage,
        name=f"process {message_name(subject)}",
        trace=group,
        id=process_id(group, stamp.stage, stamp.attempt),
        parent=root_id(group),
        kind="consumer",
        start_ns=stamp.start_ns,
        end_ns=max(stamp.end_ns, stamp.start_ns),
        attributes={
            **_message(subject, server),
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "rl.group.id": group,
            "rl.delivery.attempt": stamp.attempt,
            "rl.queue.wait_s": wait_s,
            **(attributes or {}),
            **({} if error is None else {"error.type": type(error).__name__}),
        },
        error=None if error is None else str(error),
    )
    return [*waited, worked, *children]


def _wait_spans(service: str, group: str, id_: str, subject: str, times: Times) -> list[Span]:
    """Return the wait from being stored to being taken up; none where there was no time for one.

    A span without a duration would not do: Jaeger calls it negative.
    """
    stored_ns, taken_ns = times
    end_ns = taken_ns - GAP_NS
    if end_ns <= stored_ns:
        return []
    return [
        Span(
            service=service,
            name=f"queue.wait {message_name(subject)}",
            trace=group,
            id=id_,
            parent=root_id(group),
            kind="internal",
            start_ns=stored_ns,
            end_ns=end_ns,
            attributes=_message(subject),
        )
    ]


def process_id(group: str, stage: str, attempt: int) -> str:
    """Return the id of a stage's `process` span, the parent of what the stage does for the group."""
    return span_id(group, "process", stage, attempt)


def delivery_attributes(seq: int, durable: str) -> Attributes:
    """Return the span attributes of the delivery of the rollout at `seq` by consumer `durable`."""
    return {"messaging.message.id": f"{subjects.ROLLOUTS}:{seq}", "messaging.consumer.group.name": durable}


def stage_subject(stage: str, run: str, env: str, revision: str = subjects.LIVE) -> str:
    """Return the subject from which a stage takes a group up."""
    match stage:
        case "normalizer":
            return subjects.event("score", run, revision, env)
        case "batcher" | "curriculum":
            return subjects.event("reward", run, revision, env)
    return subjects.rollout(run, env)


def publish_span(
    service: str,
    trace: str,
    parent: str,
    subject: str,
    times: Times,
    *,
    server: Server | None,
    message: str,
    size: int,
) -> Span:
    """Return the span of storing a message of `size` bytes as `message`, `{stream}:{sequence}`."""
    return Span(
        service=service,
        name=f"publish {message_name(subject)}",
        trace=trace,
        id=span_id(trace, "publish", parent),
        parent=parent,
        kind="client",
        start_ns=times[0],
        end_ns=times[1],
        attributes={**publish_attributes(subject, server, size), "messaging.message.id": message},
    )


def publish_attributes(subject: str, server: Server | None, size: int) -> Attributes:
    """Return what the span of storing a message of `size` bytes on `subject` says."""
    return {
        **_message(subject, server),
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.message.body.size": size,
    }


def consume_spans(
    service: str,
    group: str,
    trace: str,
    step: int,
    times: tuple[int, int, int],
    *,
    subject: str,
    server: Server | None = None,
) -> list[Span]:
    """Return the spans of a group's wait for optimizer step `step` and of its part in that step.

    They link to the step in the batch's trace.

    `times`: batched, step begun, step done, Unix ns. `subject`: the ledger's.
    """
    batched_ns, start_ns, end_ns = times
    waited = _wait_spans(service, group, span_id(group, "wait", "train.consume"), subject, (batched_ns, start_ns))
    consumed = Span(
        service=service,
        name="train.consume",
        trace=group,
        id=span_id(group, "train.consume"),
        parent=root_id(group),
        kind="consumer",
        start_ns=start_ns,
        end_ns=end_ns,
        attributes={
            **_message(subject, server),
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "rl.group.id": group,
            "rl.train.step": step,
            "rl.batch.id": step - 1,
            "rl.train.trace_id": trace,
        },
        links=[SpanLink(trace, span_id(trace, "train.step"))],
    )
    return [*waited, consumed]


def rebuild_trace(end: RolloutEnd, stamps: Iterable[Stamp]) -> list[Span]:
    """Return a whole trace that was not exported on the way, as far as the stamps show.

    Root, generation, stages.
    """
    stamps = sorted(stamps, key=lambda stamp: stamp.start_ns)
    stored = [stamp.stored_ns for stamp in stamps]
    spans = [generate_span(end.group, end.env, (end.started_ns, min(stored)))] if stored else []
    for stamp in stamps:
        spans += stamp_spans(end, stamp)
    return [*spans, root_span(end)]


def stamp_spans(end: RolloutEnd, stamp: Stamp, failure: tuple[str, str] | None = None) -> list[Span]:
    """Return a stage's spans in the trace of a rollout that ended, as far as the stamp shows.

    `failure` is the type and the text of the error that ended the work.
    """
    subject = stage_subject(stamp.stage, end.run, end.env, end.revision)
    taken = None
    if subject == subjects.rollout(end.run, end.env) and end.seq is not None:
        taken = delivery_attributes(end.seq, subjects.durable(stamp.stage, end.run, end.revision))
    spans = stage_spans(end.group, stamp, subject, taken)
    if failure is not None:
        kind, text = failure
        attributes = {**spans[-1].attributes, "error.type": kind}
        spans[-1] = msgspec.structs.replace(spans[-1], attributes=attributes, error=text)
    return spans


def message_name(subject: str) -> str:
    """Return what a span's name says of a subject.

    Its template, which is the same for all runs and environments.
    """
    return _template(subject)[0]


def _message(subject: str, server: Server | None = None) -> dict[str, str | int | float]:
    """Return what every span of a message on `subject` says; `server`: which one it was stored on or taken from."""
    found: dict[str, str | int | float] = {"messaging.system": "nats", "messaging.destination.name": subject}
    template, about = _template(subject)
    if template != subject:
        found["messaging.destination.template"] = template
    found |= about
    if server is not None:
        found["server.address"], found["server.port"] = server
    return found


@lru_cache(maxsize=256)
def _template(subject: str) -> tuple[str, dict[str, str]]:
    """Return the template of a subject, `rl.rollout.{run}.{env}` say, and the attributes that its names make.

    A subject that is none of ours is its own template: there are no such spans.
    """
    channel = channel_of(subject)
    if channel is None:
        return subject, {}
    names = dict(zip(channel.address.split("."), subject.split("."), strict=True))
    return channel.address, {attribute: names[part] for part, attribute in _NAMED.items() if part in names}
