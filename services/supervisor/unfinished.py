"""Ends the traces of a run's unfinished rollouts, so that every span has its root.

Reads the streams once every service has stopped: rollouts without an outcome, and batches that were not trained.
Exports a root span for each of them that is traced: those of the sampled share, and dead ones that the batcher did not
reach. Writes nothing to a stream. A run that is continued ends these rollouts once more.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.producer_dedup import ResolvedSet
from lachesis.pipeline.ledger.reader import follow_ledger, newest_entry
from lachesis.pipeline.telemetry.spans import RolloutEnd, root_span
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import LachesisError, SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.observe.progress import recent_figures
from lachesis.services.process.telemetry import open_tracing

__all__ = ["trace_unfinished", "unfinished_rollouts"]

log = logging.getLogger("lachesis")

_PATIENCE_S = 10.0


async def trace_unfinished(bus: Bus, config: RunConfig) -> None:
    """Export the roots of rollouts that have not ended, for ten seconds at most.

    Without traces nothing is done.
    """
    if not config.telemetry.wanted():
        return
    try:
        with open_tracing(config, "supervisor", "1") as tracing, anyio.fail_after(_PATIENCE_S):
            if tracing.on:
                await _trace(bus, config, tracing)
    except (LachesisError, TimeoutError) as error:
        reason = str(error) or f"it took longer than {_PATIENCE_S:g} s"
        log.warning("traces of rollouts that were not finished have no root span: %s", reason)


async def _trace(bus: Bus, config: RunConfig, tracing: Tracing) -> None:
    async with aclosing(unfinished_rollouts(bus, config)) as ends:
        async for end in ends:
            if tracing.sampled(end.group) or end.cause == "dead":
                kept = "failed" if end.cause == "dead" else "ratio"
                tracing.emit([root_span(msgspec.structs.replace(end, kept=kept))])


class _ReadPosition(NamedTuple):
    """How far the run's trainer came: the ledger entries it has consumed, the number of batches it has trained."""

    ledger: LedgerPosition
    batches: int


async def unfinished_rollouts(bus: Bus, config: RunConfig) -> AsyncGenerator[RolloutEnd]:
    """Yield the end of each rollout that is stored and neither trained nor settled otherwise, as of now."""
    entry, _, _ = await newest_entry(bus, config.run, config.training.name)
    resolved = ResolvedSet(entry.watermark, entry.resolved) if entry else ResolvedSet()
    batched = await _untrained(bus, config)
    dead = await _dead(bus, config, entry)
    start = min([resolved.watermark + 1, *batched])
    seen: set[str] = set()
    now_ns = await bus.server_time_ns()
    filters = [subjects.rollout(config.run)]
    async with bus.read(subjects.ROLLOUTS, filters, start=start, headers_only=True, follow=False) as messages:
        async for message in messages:
            if message.seq in resolved and message.seq not in batched:
                continue
            try:
                plan = Plan.unpack(message.headers.get(PLAN_HEADER))
            except SchemaError:
                continue  # no rollout
            if plan.group in seen:
                continue  # a copy
            seen.add(plan.group)
            reason = dead.get(message.seq)
            yield RolloutEnd(
                group=plan.group,
                run=config.run,
                env=message.subject.rsplit(".", 1)[-1],
                seq=message.seq,
                sequences=plan.samples,
                policy_step=plan.policy_step,
                started_ns=plan.started_ns,
                ended_ns=now_ns,
                outcome="unfinished" if reason is None else "dead_letter",
                revision=config.revision,
                cause=None if reason is None else "dead",
                reason=reason or ("batched, and not trained" if message.seq in batched else "the run ended before"),
            )


async def _untrained(bus: Bus, config: RunConfig) -> set[int]:
    """Return the sequences of the rollouts in batches that the run's own trainer has not trained."""
    if config.mode == "observe":
        return set()  # the batcher ends what it batches
    position = await _trained(bus, config)
    found: set[int] = set()
    entries = follow_ledger(bus, config.run, config.training.name, position.ledger, follow=False)
    async with aclosing(entries):
        async for entry in entries:
            if entry.batch is not None and entry.batch.number >= position.batches:
                found |= {ref.seq for ref in entry.batch.groups}
    return found


async def _trained(bus: Bus, config: RunConfig) -> _ReadPosition:
    """Return the position of the newest report, and of the log of figures, which is ahead of it after a crash."""
    logged = max((int(figures.get("train/step", 0)) for figures in recent_figures(config.path)), default=0)
    subject = subjects.state(config.run, "trainer", subjects.LIVE, config.training.name)
    report, _, _ = await read_last_event(bus, subjects.LEDGER, subject, TrainReport, lambda one: one.run == config.run)
    if report is None:
        return _ReadPosition(LedgerPosition(), logged)
    return _ReadPosition(LedgerPosition(report.ledger_index + 1, report.chain), max(report.next_batch, logged))


async def _dead(bus: Bus, config: RunConfig, entry: LedgerEntry | None) -> dict[int, str]:
    """Return why rollouts are dead whose letters the batcher may not have read, by their sequences."""
    start = entry.events_cursor if entry else 1
    filters = [subjects.event("dead", config.run, config.revision)]
    found: dict[int, str] = {}
    async with bus.read(subjects.EVENTS, filters, start=max(1, start), follow=False) as letters:
        async for message in letters:
            try:
                letter = decode(DeadLetter, message.data)
            except SchemaError:
                continue  # it says nothing of any rollout
            if letter.ends_rollout:
                found.setdefault(letter.seq, f"{letter.stage}, {letter.kind}: {letter.reason}"[:500])
    return found
