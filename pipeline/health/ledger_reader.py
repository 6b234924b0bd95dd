"""Reads a ledger and verifies it.

It reads what was added since the last time, and everything after the server was unavailable.

A server with a damaged store silently leaves out entries that it cannot read. So the number of entries read is compared
with the server's count; and everything is read again after the connection was lost, since a damaged store shows after a
restart.
"""

from lachesis.pipeline.bus.api import Bus, StoredMessage, StreamExtent
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.errors import DamagedError
from lachesis.pipeline.ledger.audit import LedgerAudit, LedgerProblem, LedgerRules
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER
from lachesis.pipeline.retention.holds import read_record
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError, VersionError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.subjects import LEDGER

__all__ = ["LEDGER_REPAIR_HINT", "LedgerReader"]

LEDGER_REPAIR_HINT = (
    "Restore the server's store from a backup (in a cluster: let another copy lead), or start a new run, and set its "
    "`model` to a checkpoint of this one if you like; `lachesis reproduce` says what of this one still holds"
)
"""What to do about a ledger that is broken."""


class LedgerReader:
    """Verifies the ledger of the run's trainer. `audit` is None before the first look."""

    def __init__(self, bus: Bus, run: str, trainer: str, rules: LedgerRules | None = None) -> None:
        self.audit: LedgerAudit | None = None
        self._bus = bus
        self._run = run
        self._trainer = trainer
        self._rules = rules
        self._subject = subjects.ledger(run, trainer)
        self._extent = StreamExtent(0, 0)
        self._reconnects = -1
        self._lost_bytes = 0

    @property
    def entries(self) -> int:
        """How many entries were verified."""
        return self.audit.position.entries if self.audit else 0

    async def verify_new_entries(self) -> list[LedgerProblem]:
        """Return the faults of entries added since the last call; of all entries if the connection was lost.

        Raises `InfrastructureError`, and `VersionError` for entries of a newer build.
        """
        reconnects = self._bus.reconnects
        # the count first: all that it counts is there when it is read, and what is stored meanwhile counts next time
        extent = await self._bus.extent(LEDGER, self._subject)
        if self.audit is None or reconnects != self._reconnects or extent.messages < self._extent.messages:
            known = self.audit.position if self.audit else None
            gone_below = await self._gone_below()
            self.audit = LedgerAudit(self._subject, self._rules, gone_below=gone_below, known=known)
        elif extent.messages == self._extent.messages:
            return []
        problems = await self._read(self.audit, extent)
        self._extent, self._reconnects = extent, reconnects
        return [*problems, *await self._lost()]

    async def _gone_below(self) -> int:
        try:
            return (await read_record(self._bus, self._run)).trimmed.get(LEDGER, 1)
        except (SchemaError, DamagedError):
            return 1

    async def _read(self, audit: LedgerAudit, extent: StreamExtent) -> list[LedgerProblem]:
        problems: list[LedgerProblem] = []
        if extent.last >= audit.next_seq:
            async with self._bus.read(LEDGER, [self._subject], start=audit.next_seq, follow=False) as messages:
                async for message in messages:
                    problems += audit.verify_entry(message.seq, await self._entry(message), _previous(message))
        return problems + audit.count(extent.messages)

    async def _entry(self, message: StoredMessage) -> LedgerEntry | None:
        """Return the entry in a message, None where it is none of this ledger: readers pass over it."""
        try:
            entry = decode(LedgerEntry, message.data)
        except SchemaError as error:
            if isinstance(error, VersionError):
                await confirm_newer(self._bus, message, error)
            return None
        return entry if (entry.run, entry.trainer) == (self._run, self._trainer) else None

    async def _lost(self) -> list[LedgerProblem]:
        lost = (await self._bus.usage(LEDGER)).lost_bytes
        reported, self._lost_bytes = self._lost_bytes, lost
        if lost <= reported:
            return []
        text = f"stream {LEDGER}: the server could not read {lost} bytes of its store when it started"
        return [LedgerProblem("unreadable", text)]


def _previous(message: StoredMessage) -> int | None:
    text = message.headers.get(PREVIOUS_HEADER, "")
    return int(text) if text.isdecimal() and len(text) < 19 else None
