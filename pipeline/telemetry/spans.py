"""The trace model: one flat trace for each rollout group, one for each batch.

Pure: stamps in, spans out.

A group's id is its trace id, and the root span's id is the id's second half, so every stage can add to the trace of any
group it names. Each stage adds two children of the root: `queue.wait`, from being stored to being taken up, and
`process`. The process that ends the rollout adds the root itself. Ids of spans are hashes of their subject, so repeated
work gives the same ids, and a trace rebuilt from stamps has the ids of one that was exported on the way.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from lachesis.schemas import subjects

__all__ = [
    "GAP_NS",
    "Attributes",
    "RolloutEnd",
    "Server",
    "Span",
    "SpanKind",
    "SpanLink",
    "Times",
    "batch_span",
    "batch_trace",
    "generate_id",
    "generate_span",
    "group_links",
    "parent_span",
    "root_id",
    "root_span",
    "sampled_parent",
    "span_id",
    "step_span",
]

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
SpanKind = Literal["internal", "server", "client", "consumer"]
Times = tuple[int, int]
"""Start and end, Unix ns."""
Server = tuple[str, int]
"""Host and port of the NATS server that a process was connected to."""

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
GAP_NS = 1_000
"""Between the end of a wait and the start of the work: with equal times a viewer may draw them in either order."""


class SpanLink(msgspec.Struct, frozen=True):
    """A reference to a span of another trace."""

    trace: str
    span: str


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A finished span. `trace` is 32 hex digits, `id` and `parent` 16; times are Unix ns of the server's clock.

    `name` is one of few: what grows with runs and environments is an attribute. `service` is the project's own name,
    which is exported as `subjects.service_name` has it.
    """

    service: str
    name: str
    trace: str
    id: str
    parent: str | None
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Attributes = {}
    links: Sequence[SpanLink] = ()
    error: str | None = None


class RolloutEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rollout ended, as its root span says it. Times are Unix ns; `kept` says why the trace is kept.

    `cause` is the outcome in the ledger's own words (stale, zero_variance, dead, ...), "void" for a batch that could
    not be trained, None for one that was. `late` says that a batch did not wait for its teacher any longer.
    `policy_version` is None where the planning fields alone are known, which hold the step; `seq` and `policy_step` are
    None of a group that was never stored.
    """

    group: str
    run: str
    env: str
    seq: int | None
    sequences: int
    policy_step: int | None
    started_ns: int
    ended_ns: int
    outcome: Literal["trained", "batched", "dropped", "dead_letter", "unfinished"]
    revision: str = subjects.LIVE
    kept: str = ""
    cause: str | None = None
    late: bool = False
    reason: str | None = None
    step: int | None = None
    staleness: int | None = None
    policy_version: str | None = None


def parent_span(traceparent: str) -> SpanLink | None:
    """Return the span that a W3C `traceparent` header of another system names, None where it names none."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or not (int(found[1], 16) and int(found[2], 16)):
        return None
    return SpanLink(found[1], found[2])


def sampled_parent(traceparent: str) -> SpanLink | None:
    """Return the exported span that a W3C `traceparent` header names; None for any other header."""
    parent = parent_span(traceparent)
    flags = traceparent.strip().split("-")[3] if parent is not None else "00"
    return parent if int(flags, 16) & 1 else None


def root_id(group: str) -> str:
    """Return the id of a group's root span."""
    return group[16:]


def span_id(trace: str, *what: object) -> str:
    """Return the id of the span of `trace` that is about `what`."""
    return hashlib.blake2b(" ".join(map(str, (trace, *what))).encode(), digest_size=8).hexdigest()


def batch_trace(run: str, trainer: str, number: int) -> str:
    """Return the trace id of a batch."""
    return hashlib.blake2b(f"{run} {trainer} {number}".encode(), digest_size=16).hexdigest()


def batch_span(
    service: str, trace: str, groups: Sequence[str], times: Times, attributes: Attributes, *, kept: Iterable[str]
) -> Span:
    """Return the root of a batch's trace.

    It names all groups and links to the `kept` ones: others have no trace.
    """
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
        links=group_links(kept),
    )


def group_links(groups: Iterable[str]) -> list[SpanLink]:
    """Return links to the roots of groups whose traces are kept."""
    return [SpanLink(group, root_id(group)) for group in groups]


def step_span(
    service: str,
    trace: str,
    times: Times,
    attributes: Attributes,
    *,
    links: Sequence[SpanLink] = (),
    error: str | None = None,
) -> Span:
    """Return the span of the trainer's work on a batch, a child of its root."""
    return Span(
        service=service,
        name="train.step",
        trace=trace,
        id=span_id(trace, "train.step"),
        parent=span_id(trace, "assemble batch"),
        kind="internal",
        start_ns=times[0],
        end_ns=times[1],
        attributes=attributes,
        links=links,
        error=error,
    )


def root_span(end: RolloutEnd) -> Span:
    """Return the root of a group's trace: from the environment's start to the rollout's end."""
    attributes: dict[str, str | int | float | bool | Sequence[str]] = {
        "rl.group.id": end.group,
        "rl.group.size": end.sequences,
        "rl.run": end.run,
        "rl.env.name": end.env,
        "rl.outcome": end.outcome,
        "rl.e2e_s": (end.ended_ns - end.started_ns) / 1e9,
        "rl.sampling.reason": end.kept,
    }
    if end.seq is not None:
        attributes["messaging.message.id"] = f"{subjects.ROLLOUTS}:{end.seq}"
    if end.policy_step is not None:
        attributes["rl.policy.step"] = end.policy_step
    if end.step is not None:
        attributes["rl.train.step"] = end.step
    if end.staleness is not None:
        attributes["rl.staleness"] = end.staleness
    if end.policy_version is not None:
        attributes["rl.policy.version"] = end.policy_version
    if end.reason is not None:
        attributes["rl.outcome.reason"] = end.reason
    return Span(
        service=subjects.ENVIRONMENT,
        name="rollout",
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
        service=subjects.ENVIRONMENT,
        name="generate",
        trace=group,
        id=generate_id(group),
        parent=root_id(group),
        kind="internal",
        start_ns=times[0],
        end_ns=max(times),
        attributes={"rl.env.name": env, **(attributes or {})},
    )
