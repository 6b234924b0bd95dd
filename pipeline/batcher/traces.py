"""Exports the traces of a ledger entry: work on each group, the batch, and ended rollouts."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lachesis.pipeline.batcher.join import PendingRollout
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.messages import process_id, publish_span, stage_spans, stage_subject
from lachesis.pipeline.telemetry.spans import RolloutEnd, Times, batch_span, batch_trace
from lachesis.schemas import subjects
from lachesis.schemas.ledger import LedgerEntry

__all__ = ["StoredEntry", "trace_entry"]


_OUTCOME_OF_KIND: dict[str, Literal["batched", "dead_letter"]] = {"batched": "batched", "dead": "dead_letter"}


class StoredEntry(NamedTuple):
    """An entry and how it was stored: its sequence in LEDGER, its bytes, and start and end of the storing, Unix ns."""

    entry: LedgerEntry
    seq: int
    size: int
    times: Times


def trace_entry(
    service: Service,
    stored: StoredEntry,
    members: Sequence[PendingRollout],
    start_ns: int,
    *,
    ends_batched: bool = False,
) -> None:
    """Export the spans of a stored entry that was begun at `start_ns`.

    `members` are the rollouts batched or settled in it. `ends_batched`: no trainer of the run will end the traces of
    batched rollouts.
    """
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
        kind = outcome.kind if outcome else "batched"
        if kind == "duplicate" or (kind == "batched" and not ends_batched):  # a duplicate shares the original's trace
            continue
        end = RolloutEnd(
            group=group,
            run=run,
            env=member.env,
            seq=member.seq,
            sequences=member.plan.samples,
            policy_step=member.plan.policy_step,
            started_ns=member.plan.started_ns,
            ended_ns=service.now_ns(),
            outcome=_OUTCOME_OF_KIND.get(kind, "dropped"),
            cause=kind,
            revision=service.revision,
            reason=": ".join(filter(None, (outcome.kind, outcome.reason))) if outcome else None,
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
        # whether the others are kept is not known yet: the step links to those that were
        kept = filter(tracing.sampled, groups)
        tracing.emit([batch_span(service.name, trace, groups, (start_ns, service.now_ns()), attributes, kept=kept)])
