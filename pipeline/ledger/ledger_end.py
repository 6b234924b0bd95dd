"""Reads the end of a ledger, and refuses one that its writer cannot have written.

With the batcher's key, anyone can write an entry that follows in the chain and has any content. So the newest entry is
compared with the one before it and with the streams that it refers to, before anything is written after it.
"""

from collections.abc import Iterator
from contextlib import aclosing
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.audit import batch_number, settled_again, settled_rollouts
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.evidence import check_evidence
from lachesis.pipeline.ledger.reader import check_rollouts, entry_before, follow_ledger, newest_entry
from lachesis.pipeline.runtime.stream_marks import (
    MARKS_HEADER,
    MAX_LOST,
    StreamMarks,
    check_marks,
    recovery_hint,
)
from lachesis.schemas.errors import LedgerError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS

__all__ = ["LedgerEnd", "check_whole_ledger", "describe_misfit", "read_ledger_end"]


class LedgerEnd(NamedTuple):
    """The newest entry (None if there is none), its sequence in LEDGER, the sequence of the subject's last message, and
    the newest message of each stream that the writer of the entry had read.
    """

    entry: LedgerEntry | None
    entry_seq: int
    seq: int
    marks: StreamMarks


async def read_ledger_end(bus: Bus, config: RunConfig, *, patience_s: float | None = None) -> LedgerEnd:
    """Return where the live trainer's ledger ends.

    `patience_s`: as in `check_marks`. Raises `HistoryLostError` if the newest entry does not fit the streams, since the
    broker lost history, and `LedgerError` or `SchemaError` if the batcher cannot have written it.
    """
    run, trainer = config.run, config.training.name
    entry, entry_seq, seq = await newest_entry(bus, run, trainer, newer="refuse")
    await check_evidence(bus, config, is_empty=entry is None)
    if entry is None:
        return LedgerEnd(None, 0, seq, StreamMarks())
    before = await entry_before(bus, run, trainer, entry, entry_seq)
    misfit = next(iter(_beyond_streams(entry, await _last(bus, ROLLOUTS), await _last(bus, EVENTS))), None)
    if (misfit := misfit or describe_misfit(entry, before)) is not None:
        raise LedgerError(
            f"entry {entry.index} of the ledger, at sequence {entry_seq} of LEDGER, {misfit}: the batcher did not "
            f"write it. {recovery_hint(run)}"
        )
    await check_rollouts(bus, entry)
    marks = StreamMarks.from_header((await bus.get_head(LEDGER, entry_seq)).headers.get(MARKS_HEADER))
    await check_marks(bus, run, marks.newest, writer="the batcher", patience_s=patience_s)
    return LedgerEnd(entry, entry_seq, seq, marks)


async def check_whole_ledger(bus: Bus, config: RunConfig) -> None:
    """Raise as `read_ledger_end` without patience, and `LedgerError` if the chain does not hold."""
    await read_ledger_end(bus, config, patience_s=0)
    async with aclosing(follow_ledger(bus, config.run, config.training.name, LedgerPosition(), follow=False)) as all_:
        async for _ in all_:
            pass


async def _last(bus: Bus, stream: str) -> int:
    return (await bus.usage(stream)).last


def _beyond_streams(entry: LedgerEntry, rollouts: int, events: int) -> Iterator[str]:
    """Yield the references of an entry to messages that no stream can have held: so many are never lost at once."""
    told = [entry.watermark, *settled_rollouts(entry)]
    if (highest := max(told)) > rollouts + MAX_LOST:
        yield f"speaks of sequence {highest} of ROLLOUTS, which ends at {rollouts}"
    if entry.events_cursor > events + MAX_LOST:
        yield f"has read sequence {entry.events_cursor - 1} of EVENTS, which ends at {events}"
    if (bits := len(entry.resolved) * 8) > MAX_LOST + max(0, rollouts - entry.watermark):
        yield f"settles up to {bits} rollouts after sequence {entry.watermark} of ROLLOUTS, which ends at {rollouts}"


def describe_misfit(entry: LedgerEntry, before: LedgerEntry | None) -> str | None:
    """Return how an entry contradicts the one before it, or None if it does not. Pure.

    `before` is None if `entry` is the first.
    """
    if before is None and entry.index:
        return None  # the entries before were deleted on purpose
    watermark, next_batch = (before.watermark, before.next_batch) if before is not None else (0, 0)
    if entry.watermark < watermark:
        return (
            f"settles rollouts up to {entry.watermark} alone, where the entry before it settled them up to {watermark}"
        )
    if (number := batch_number(entry)) != next_batch:
        return f"has batch {number} where {next_batch} follows"
    if again := settled_again(entry, before):
        return f"gives rollouts a second outcome, among them that at sequence {again[0]} of ROLLOUTS"
    told = before.totals if before is not None else {}
    batched = entry.batch.sequences if entry.batch else 0
    most = len(settled_rollouts(entry)) + batched + sum(one.sequences for one in entry.outcomes)
    if wrong := [what for what, total in entry.totals.items() if not 0 <= total - told.get(what, 0) <= most]:
        return f"counts {entry.totals[wrong[0]]} {wrong[0]}, where the entry before it counted {told.get(wrong[0], 0)}"
    return None
