"""What the trainer tells of a batch in traces: the step, and for each of its groups how its rollout ended."""

from collections.abc import Mapping

import msgspec

from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.telemetry.messages import consume_spans
from lachesis.pipeline.telemetry.spans import RolloutEnd, Span, Times, batch_trace, span_id, step_span
from lachesis.pipeline.training.feed import FedBatch
from lachesis.schemas import subjects

__all__ = ["step_trace", "trace_step"]


def step_trace(batch: FedBatch) -> tuple[str, str]:
    """Return the trace of a batch and the id of its step's span."""
    trace = batch_trace(batch.entry.run, batch.entry.trainer, batch.batch.number)
    return trace, span_id(trace, "train.step")


def trace_step(
    service: Service,
    batch: FedBatch,
    times: Times,
    children: list[Span],
    *,
    void: str | None,
    dropped: Mapping[int, str],
) -> list[str]:
    """Export a step and end its rollouts; return the groups whose traces are kept.

    `void` says why nothing was learned, None if something was; `dropped` why groups were left out, by their sequence.
    """
    tracing, entry = service.tracing, batch.entry
    kept: list[str] = []
    if not tracing.on:
        return kept
    trace, _ = step_trace(batch)
    step = batch.batch.number + 1
    attributes: dict[str, str | int] = {"rl.run": entry.run, "rl.train.step": step, "rl.batch.id": batch.batch.number}
    children = [msgspec.structs.replace(one, attributes={**attributes, **one.attributes}) for one in children]
    tracing.emit([*children, step_span(service.name, trace, "train.step", times, attributes, error=void)])
    ledger = subjects.ledger(entry.run, entry.trainer)
    versions = {ref.group: group.policy_versions[0] for ref, group, _ in batch.groups}
    for ref in batch.batch.groups:
        started_ns = batch.started_ns.get(ref.group)
        if started_ns is None:
            continue
        reason = void or dropped.get(ref.seq)
        end = RolloutEnd(
            group=ref.group,
            run=entry.run,
            env=ref.env,
            seq=ref.seq,
            sequences=ref.sequences,
            policy_step=ref.policy_step,
            started_ns=started_ns,
            ended_ns=times[1],
            outcome="dropped" if reason else "trained",
            revision=service.revision,
            reason=reason,
            step=step,
            staleness=batch.batch.number - ref.policy_step,
            policy_version=versions.get(ref.group),
        )
        consumed = consume_spans(
            service.name, ref.group, trace, step, (entry.written_ns, *times), subject=ledger, server=service.bus.server
        )
        if tracing.end(end, entry.stamps.get(ref.group, []), consumed):
            kept.append(ref.group)
    return kept
