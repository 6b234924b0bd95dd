"""What the batcher tells of an entry in traces: its own work on each group, the batch, and rollouts that end here."""

from collections.abc import Sequence
from typing import NamedTuple

from lachesis.pipeline.batching.join import Member
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.telemetry.messages import process_id, publish_span, stage_spans, stage_subject
from lachesis.pipeline.telemetry.spans import RolloutEnd, Times, batch_span, batch_trace
from lachesis.schemas import subjects
from lachesis.schemas.ledger import LedgerEntry

__all__ = ["StoredEntry", "trace_entry"]


class StoredEntry(NamedTuple):
    """An entry and how it was stored: its sequence in LEDGER, its bytes, and when that began and was done, Unix ns."""

    entry: LedgerEntry
    seq: int
    size: int
    times: Times


def trace_entry(service: Service, stored: StoredEntry, members: Sequence[Member], start_ns: int) -> None:
    """Export the spans of a stored entry, begun at `start_ns`. `members` are those batched or settled in it."""
    tracing, entry, run = service.tracing, stored.entry, stored.entry.run
    server, ledger = service.bus.server, subjects.ledger(run, entry.trainer)
    if not tracing.on:
        return
    for member in members:
        stamps = entry.stamps.get(member.plan.group) if member.plan else None
        if member.plan is None or not stamps:
            continue
        group = member.plan.group
        if tracing.sampled(group):
            subject = stage_subject(service.name, run, member.env, service.revision)
            published = publish_span(
                service.name, group, process_id(group, service.name, stamps[-1].attempt), ledger, stored.times,
                server=server, message=f"{subjects.LEDGER}:{stored.seq}", size=stored.size,
            )  # fmt: skip
            tracing.emit([*stage_spans(group, stamps[-1], subject, server=server), published])
        outcome = member.outcome
        if outcome is None or outcome.kind in {"batched", "duplicate"}:  # a duplicate's trace is the first one's
            continue
        end = RolloutEnd(
            group=group,
            run=run,
            env=member.env,
            seq=member.seq,
            sequences=member.plan.sequences,
            policy_step=member.plan.policy_step,
            started_ns=member.plan.started_ns,
            ended_ns=service.now_ns(),
            outcome="dead_letter" if outcome.kind == "dead" else "dropped",
            revision=service.revision,
            reason=": ".join(filter(None, (outcome.kind, outcome.reason))),
        )
        tracing.end(end, stamps)
    if entry.batch is not None:
        trace = batch_trace(run, entry.trainer, entry.batch.number)
        groups = [ref.group for ref in entry.batch.groups]
        attributes: dict[str, str | int] = {
            "rl.run": run,
            "rl.batch.id": entry.batch.number,
            "rl.batch.sequences": entry.batch.sequences,
            "rl.batch.tokens": entry.batch.tokens,
        }
        tracing.emit([batch_span(service.name, trace, groups, (start_ns, service.now_ns()), attributes)])
