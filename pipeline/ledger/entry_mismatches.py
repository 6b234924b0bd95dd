"""Compares a ledger entry with the one before it and with the ends of the streams. Pure.

With the batcher's key, anyone can write an entry that follows in the chain and has any content. An entry that the
batcher cannot have written is refused before anything is written after it, and before it is trained on.
"""

from lachesis.pipeline.ledger.audit import batch_number, settled_again, settled_rollouts
from lachesis.pipeline.runtime.stream_marks import MAX_LOST
from lachesis.schemas.ledger import LedgerEntry

__all__ = ["describe_misfit", "describe_reach"]


def describe_reach(entry: LedgerEntry, rollouts: int, events: int) -> str | None:
    """Return which messages an entry refers to that no stream can have held: so many are never lost.

    `rollouts` and `events`: where those streams end. None if there are no such references.
    """
    if (highest := max(entry.watermark, *settled_rollouts(entry), 0)) > rollouts + MAX_LOST:
        return f"speaks of sequence {highest} of ROLLOUTS, which ends at {rollouts}"
    if entry.events_cursor > events + MAX_LOST:
        return f"has read sequence {entry.events_cursor - 1} of EVENTS, which ends at {events}"
    if (bits := len(entry.resolved) * 8) > MAX_LOST + max(0, rollouts - entry.watermark):
        return f"settles up to {bits} rollouts after sequence {entry.watermark} of ROLLOUTS, which ends at {rollouts}"
    return None


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
    totals = before.totals if before is not None else {}
    batched = entry.batch.sequences if entry.batch else 0
    most = len(settled_rollouts(entry)) + batched + sum(one.sequences for one in entry.outcomes)
    for what, total in entry.totals.items():
        known = totals.get(what, 0)
        if not 0 <= total - known <= most:
            return f"counts {total} {what}, where the entry before it counted {known}"
    return None
