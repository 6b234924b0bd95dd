"""The trace model: one flat trace for each rollout group, one for each batch. Pure: stamps in, spans out.

A group's id is its trace id, and the root span's id is the id's second half, so every stage can add to the trace of any
group it names. Each stage adds two children of the root: `queue.wait`, from being stored to being taken up, and
`process`. Whoever ends the rollout adds the root itself. Ids of spans are hashes of what they are about, so that work
which is done again says the same thing again, and a trace rebuilt from stamps has the ids of one that was exported on
the way.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from lachesis.schemas import subjects
from lachesis.schemas.annotations import Stamp

__all__ = [
    "Attributes",
    "Link",
    "RolloutEnd",
    "Span",
    "SpanKind",
    "Times",
    "batch_span",
    "batch_trace",
    "consume_spans",
    "generate_id",
    "generate_span",
    "hold_span",
    "parent_span",
    "process_id",
    "publish_span",
    "rebuilt",
    "root_id",
    "root_span",
    "span_id",
    "stage_spans",
    "stage_subject",
    "step_span",
]

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
SpanKind = Literal["internal", "client", "consumer"]
Times = tuple[int, int]
"""Start and end, Unix ns."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
_GAP_NS = 1_000
"""Between the end of a wait and the start of the work: with equal times a viewer may draw them in either order."""


class Link(msgspec.Struct, frozen=True):
    """A reference to a span of another trace."""

    trace: str
    span: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span. `trace` is 32 hex digits, `id` and `parent` 16; times are Unix ns of the server's clock."""

    service: str
    name: str
    trace: str
    id: str
    parent: str | None
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Attributes = {}
    links: Sequence[Link] = ()
    error: str | None = None


class RolloutEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rollout ended, as its root span tells it. Times are Unix ns; `kept` says why the trace is kept.

    `policy_version` is None where whoever ends it has the planning fields alone, which hold the step.
    """

    group: str
    run: str
    env: str
    seq: int
    sequences: int
    policy_step: int
    started_ns: int
    ended_ns: int
    outcome: Literal["trained", "dropped", "dead_letter"]
    kept: str = ""
    reason: str | None = None
    step: int | None = None
    staleness: int | None = None
    policy_version: str | None = None


def parent_span(traceparent: str) -> Link | None:
    """Return the span that a W3C `traceparent` header of another system names, None where it names none."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or not (int(found[1], 16) and int(found[2], 16)):
        return None
    return Link(found[1], found[2])


def root_id(group: str) -> str:
    """Return the id of a group's root span."""
    return group[16:]


def span_id(trace: str, *what: object) -> str:
    """Return the id of the span of `trace` that is about `what`."""
    return hashlib.blake2b(" ".join(map(str, (trace, *what))).encode(), digest_size=8).hexdigest()


def batch_trace(run: str, trainer: str, number: int) -> str:
    """Return the trace id of a batch."""
    return hashlib.blake2b(f"{run} {trainer} {number}".encode(), digest_size=16).hexdigest()


def batch_span(service: str, trace: str, groups: Sequence[str], times: Times, attributes: Attributes) -> Span:
    """Return the root of a batch's trace, with a link to each of its groups' traces."""
    return Span(
        service=service,
        name="assemble batch",
        trace=trace,
        id=span_id(trace, "assemble batch"),
        parent=None,
        kind="internal",
        start_ns=times[0],
        end_ns=times[1],
        attributes={**attributes, "rl.group.ids": list(groups)},
        links=[Link(group, root_id(group)) for group in groups],
    )


def step_span(
    service: str,
    trace: str,
    name: str,
    times: Times,
    attributes: Attributes,
    *,
    parent: str | None = None,
    error: str | None = None,
) -> Span:
    """Return a span of the trainer's work on a batch: a child of its root, or of the step `parent` names."""
    return Span(
        service=service,
        name=name,
        trace=trace,
        id=span_id(trace, name),
        parent=span_id(trace, parent or "assemble batch"),
        kind="internal",
        start_ns=times[0],
        end_ns=times[1],
        attributes=attributes,
        error=error,
    )


def consume_spans(service: str, group: str, trace: str, step: int, times: tuple[int, int, int]) -> list[Span]:
    """Return a group's wait for optimizer step `step` and its part in it, linked to the step in the batch's trace.

    `times`: batched, step begun, step done, Unix ns.
    """
    batched_ns, start_ns, end_ns = times
    waited = Span(
        service=service,
        name="queue.wait rl.ledger",
        trace=group,
        id=span_id(group, "wait", "train.consume"),
        parent=root_id(group),
        kind="internal",
        start_ns=min(batched_ns, start_ns - _GAP_NS),
        end_ns=start_ns - _GAP_NS,
    )
    consumed = Span(
        service=service,
        name="train.consume",
        trace=group,
        id=span_id(group, "train.consume"),
        parent=root_id(group),
        kind="consumer",
        start_ns=start_ns,
        end_ns=end_ns,
        attributes={"rl.train.step": step, "rl.batch.id": step - 1, "rl.train.trace_id": trace},
        links=[Link(trace, span_id(trace, "train.step"))],
    )
    return [waited, consumed]


def stage_subject(stage: str, run: str, env: str, revision: str = subjects.LIVE) -> str:
    """Return the subject from which a stage takes a group up."""
    match stage:
        case "normalizer":
            return subjects.event("score", run, revision, env)
        case "batcher" | "curriculum":
            return subjects.event("reward", run, revision, env)
    return subjects.rollout(run, env)


def stage_spans(
    group: str, stamp: Stamp, subject: str, attributes: Attributes | None = None, *, children: Iterable[Span] = ()
) -> list[Span]:
    """Return the wait and the work of one stage on one group, with the work's own children."""
    wait_s = (stamp.start_ns - stamp.stored_ns) / 1e9
    common = {"messaging.system": "nats", "messaging.destination.name": subject}
    waited = Span(
        service=stamp.stage,
        name=f"queue.wait {subject}",
        trace=group,
        id=span_id(group, "wait", stamp.stage, stamp.attempt),
        parent=root_id(group),
        kind="internal",
        start_ns=min(stamp.stored_ns, stamp.start_ns - _GAP_NS),
        end_ns=stamp.start_ns - _GAP_NS,
        attributes=common,
    )
    worked = Span(
        service=stamp.stage,
        name=f"process {subject}",
        trace=group,
        id=process_id(group, stamp.stage, stamp.attempt),
        parent=root_id(group),
        kind="consumer",
        start_ns=stamp.start_ns,
        end_ns=max(stamp.end_ns, stamp.start_ns),
        attributes={
            **common,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "rl.group.id": group,
            "rl.delivery.attempt": stamp.attempt,
            "rl.queue.wait_s": wait_s,
            **(attributes or {}),
        },
    )
    return [waited, worked, *children]


def process_id(group: str, stage: str, attempt: int) -> str:
    """Return the id of a stage's `process` span, the parent of what the stage does for the group."""
    return span_id(group, "process", stage, attempt)


def publish_span(
    service: str, trace: str, parent: str, subject: str, times: Times, *, message: str, size: int | None = None
) -> Span:
    """Return the span of storing a message (of `size` bytes, if known) as `message`, `{stream}:{sequence}`."""
    return Span(
        service=service,
        name=f"publish {subject}",
        trace=trace,
        id=span_id(trace, "publish", parent),
        parent=parent,
        kind="client",
        start_ns=times[0],
        end_ns=times[1],
        attributes={
            "messaging.system": "nats",
            "messaging.destination.name": subject,
            "messaging.operation.name": "publish",
            "messaging.operation.type": "send",
            "messaging.message.id": message,
            **({} if size is None else {"messaging.message.body.size": size}),
        },
    )


def root_span(end: RolloutEnd) -> Span:
    """Return the root of a group's trace: from the environment's start to the rollout's end."""
    attributes: dict[str, str | int | float | bool | Sequence[str]] = {
        "rl.group.id": end.group,
        "rl.group.size": end.sequences,
        "rl.run": end.run,
        "rl.env.name": end.env,
        "rl.policy.step": end.policy_step,
        "rl.outcome": end.outcome,
        "rl.e2e_s": (end.ended_ns - end.started_ns) / 1e9,
        "rl.sampling.reason": end.kept,
        "messaging.message.id": f"{subjects.ROLLOUTS}:{end.seq}",
    }
    if end.step is not None:
        attributes["rl.train.step"] = end.step
    if end.staleness is not None:
        attributes["rl.staleness"] = end.staleness
    if end.policy_version is not None:
        attributes["rl.policy.version"] = end.policy_version
    if end.reason is not None:
        attributes["rl.outcome.reason"] = end.reason
    return Span(
        service=f"environment-{end.env}",
        name=f"rollout {end.env}",
        trace=end.group,
        id=root_id(end.group),
        parent=None,
        kind="internal",
        start_ns=end.started_ns,
        end_ns=max(end.ended_ns, end.started_ns),
        attributes=attributes,
        error=end.reason if end.outcome == "dead_letter" else None,
    )


def generate_id(group: str) -> str:
    """Return the id of a group's `generate` span."""
    return span_id(group, "generate")


def generate_span(group: str, env: str, times: Times, attributes: Attributes | None = None) -> Span:
    """Return the environment's own work on a group."""
    return Span(
        service=f"environment-{env}",
        name=f"generate {env}",
        trace=group,
        id=generate_id(group),
        parent=root_id(group),
        kind="internal",
        start_ns=times[0],
        end_ns=max(times),
        attributes=attributes or {},
    )


def hold_span(group: str, env: str, times: Times) -> Span:
    """Return a gateway's wait with a group that arrived: for a lease, or for the rest of its group."""
    return Span(
        service="gateway",
        name=f"hold {env}",
        trace=group,
        id=span_id(group, "hold"),
        parent=root_id(group),
        kind="internal",
        start_ns=times[0],
        end_ns=max(times),
    )


def rebuilt(end: RolloutEnd, stamps: Iterable[Stamp]) -> list[Span]:
    """Return a whole trace that nobody exported on the way, as far as the stamps tell: root, generation, stages."""
    stamps = sorted(stamps, key=lambda stamp: stamp.start_ns)
    stored = [stamp.stored_ns for stamp in stamps]
    spans = [generate_span(end.group, end.env, (end.started_ns, min(stored)))] if stored else []
    for stamp in stamps:
        spans += stage_spans(end.group, stamp, stage_subject(stamp.stage, end.run, end.env))
    return [*spans, root_span(end)]
