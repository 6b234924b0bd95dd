"""Exports the traces of a batch: the step, and for each of its groups how its rollout ended."""

from collections.abc import Mapping
from functools import partial

import msgspec

from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.messages import consume_spans
from lachesis.pipeline.telemetry.sampling import is_late
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, Times, batch_trace, group_links, span_id, step_span
from lachesis.pipeline.trainer.feed import LedgerBatch
from lachesis.schemas import subjects

__all__ = ["step_trace", "trace_step"]


def step_trace(batch: LedgerBatch) -> tuple[str, str]:
    """Return the trace of a batch and the id of its step's span."""
    trace = batch_trace(batch.entry.run, batch.entry.trainer, batch.batch.number)
    return trace, span_id(trace, "train.step")


def trace_step(
    service: Service,
    batch: LedgerBatch,
    times: Times,
    children: list[Span],
    *,
    void: str | None,
    dropped: Mapping[int, str],
    teacher: bool,
) -> list[str]:
    """Export a step and end its rollouts.

    Return those whose traces are kept, of the groups that could be fetched.

    `void` says why nothing was learned, None if something was; `dropped` why groups were left out, by their sequence;
    `teacher` whether batches wait for one.
    """
    tracing, entry = service.tracing, batch.entry
    if not tracing.on:
        return []
    trace, _ = step_trace(batch)
    step = batch.batch.number + 1
    ledger = subjects.ledger(entry.run, entry.trainer)
    versions = batch.policy_versions
    started_ns, kept = batch.started_ns, list[str]()
    for ref in batch.batch.groups:
        stamps = entry.stamps.get(ref.group, [])
        reason = void or dropped.get(ref.seq)
        stored_ns = min((stamp.stored_ns for stamp in stamps), default=entry.written_ns)
        end = RolloutEnd(
            group=ref.group,
            run=entry.run,
            env=ref.env,
            seq=ref.seq,
            sequences=ref.sequences,
            policy_step=ref.policy_step,
            started_ns=started_ns.get(ref.group, stored_ns),  # of a lost payload: the time of its stamps
            ended_ns=times[1],
            outcome="dropped" if reason else "trained",
            cause="void" if reason else None,
            late=teacher and ref.teacher is None and is_late(stamps),
            revision=service.revision,
            reason=reason,
            step=step,
            staleness=batch.batch.number - ref.policy_step,
            policy_version=versions.get(ref.group),
        )
        consumed = partial(
            consume_spans, service.name, ref.group, trace, step, (entry.written_ns, *times),
            subject=ledger, server=service.bus.server,
        )  # fmt: skip
        if tracing.end(end, stamps, consumed) is not None:
            kept.append(ref.group)
    attributes: dict[str, str | int] = {"rl.run": entry.run, "rl.train.step": step, "rl.batch.id": batch.batch.number}
    children = [msgspec.structs.replace(one, attributes={**attributes, **one.attributes}) for one in children]
    links = group_links(kept)
    tracing.emit([*children, step_span(service.name, trace, times, attributes, links=links, error=void)])
    return [group for group in kept if group in started_ns]
