"""Reads the end of a ledger, and refuses one that its writer cannot have written.

With the batcher's key, anyone can write an entry that follows in the chain and has any content. So the newest entry is
compared with the one before it and with the streams that it refers to, before anything is written after it.
"""

from contextlib import aclosing
from typing import NamedTuple

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.evidence import check_evidence
from lachesis.pipeline.ledger.reader import check_rollouts, entry_before, follow_ledger, newest_entry, refuse_misfit
from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.runtime.stream_marks import (
    MARKS_HEADER,
    StreamMarks,
    check_marks,
)
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.subjects import LEDGER

__all__ = ["LedgerEnd", "check_whole_ledger", "read_ledger_end"]


class LedgerEnd(NamedTuple):
    """The newest entry (None if there is none), its sequence in LEDGER, the sequence of the subject's last message, and
    the newest message of each stream that the writer of the entry had read.
    """

    entry: LedgerEntry | None
    entry_seq: int
    seq: int
    marks: StreamMarks


async def read_ledger_end(bus: Bus, settings: LedgerSettings, *, patience_s: float | None = None) -> LedgerEnd:
    """Return where the live trainer's ledger ends.

    `patience_s`: as in `check_marks`. Raises `HistoryLostError` if the newest entry does not fit the streams, since the
    broker lost history, and `LedgerError` or `SchemaError` if the batcher cannot have written it.
    """
    run, trainer = settings.run, settings.trainer
    entry, entry_seq, seq = await newest_entry(bus, run, trainer, newer="refuse")
    await check_evidence(bus, settings, is_empty=entry is None)
    if entry is None:
        return LedgerEnd(entry=None, entry_seq=0, seq=seq, marks=StreamMarks())
    before = await entry_before(bus, run, trainer, entry, entry_seq)
    await refuse_misfit(bus, entry, entry_seq, before)
    await check_rollouts(bus, entry)
    marks = StreamMarks.from_header((await bus.get_head(LEDGER, entry_seq)).headers.get(MARKS_HEADER))
    await check_marks(bus, run, marks.newest, writer="the batcher", patience_s=patience_s)
    return LedgerEnd(entry, entry_seq, seq, marks)


async def check_whole_ledger(bus: Bus, settings: LedgerSettings) -> None:
    """Raise as `read_ledger_end` without patience.

    Raises `LedgerError`, too, if any entry does not follow the one before it.
    """
    await read_ledger_end(bus, settings, patience_s=0)
    run, trainer = settings.run, settings.trainer
    entries = follow_ledger(bus, run, trainer, LedgerPosition(), follow=False, refuse_misfits=True)
    async with aclosing(entries) as all_:
        async for _ in all_:
            pass
