"""Trims history so that a run never stops for lack of room that it could make.

From the sizes of the streams and the positions of all readers (`retention_floor`), it deletes the oldest history when a
stream passes `retention.trim_at` of its budget, down to `retention.trim_to`. If that is not possible, it reports which
reader needs the rest. Guarantees that no history that a reader of the run or a hold needs is deleted, and that only the
governor that holds the term trims. If it dies half-way, more history than necessary stays.
"""

import logging
import math
import time
from collections.abc import Sequence
from functools import partial

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.retention import retention_floor
from lachesis.pipeline.retention.budget import Budget
from lachesis.pipeline.retention.holds import update_record
from lachesis.pipeline.retention.readers import Readers
from lachesis.pipeline.retention.retention_floor import RetentionClaim
from lachesis.pipeline.retention.settings import HistorySettings
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import CALLS, EVENTS, LEDGER, ROLLOUTS, TEACHER

__all__ = ["HistoryTrimmer"]

log = logging.getLogger("lachesis")

_PERIOD_S = 1.0
_STATES_S = 60.0
_STAGES_WITH_STATE = ("normalizer", "curriculum", "health", "replay", "marks")
_MAX_NAMED_HOLDERS = 4


class HistoryTrimmer:
    """Feed its `readers` with the ledger, and call `run` in a task of its own."""

    def __init__(self, service: Service, settings: HistorySettings, budget: Budget, conversations: OpenGroups) -> None:
        self.readers = Readers(service, settings.readers)
        self.metrics: dict[str, float] = {}
        self._service = service
        self._bus = service.bus
        self._settings = settings
        self._budget = budget
        self._conversations = conversations
        self._done: dict[str, int] = {}  # by subject: the sequence below which it is trimmed
        self._stopped: dict[str, str] = {}  # by stream: why producers wait
        self._states_s = self._sweep_s = float("-inf")

    async def run(self) -> None:
        """Trim whenever it is needed, until cancelled. Raises `FencedError` when a later governor trims."""
        in_office = False
        while True:
            try:
                if not in_office:
                    await update_record(
                        self._bus, self._service.run, lambda old: old.replace(term=self._service.instance)
                    )
                    in_office = True
                await self._tidy()
                for stream in (ROLLOUTS, EVENTS, TEACHER, LEDGER):
                    await self._relieve(stream)
                await self._trim_calls()
                self._service.set_problem("trimming", None)
            except InfrastructureError as error:
                self._service.set_problem("trimming", f"history was not trimmed: {error}")
            except SchemaError as error:
                self._service.set_problem(
                    "trimming", f"nothing is trimmed: a record that limits it cannot be read: {error}"
                )
            await sleep_until_tick(_PERIOD_S)

    # deletion that does not depend on room

    async def _tidy(self) -> None:
        """Delete replaced states, since a start reads only the last, and chunks that never got a head."""
        now = time.monotonic()
        run, orphans_s = self._service.run, self._settings.retention.orphans_after_s
        if now - self._states_s >= _STATES_S:
            replaced = [subjects.state(run, stage, "*", "*") for stage in _STAGES_WITH_STATE]
            await self._bus.trim(LEDGER, replaced, before=(await self._bus.usage(LEDGER)).last)
            self._states_s = now
        if now - self._sweep_s >= orphans_s:
            before_ns = await self._bus.server_time_ns() - int(orphans_s * 1e9)
            for kind, stream in subjects.BLOB_KINDS.items():
                if not (await self._bus.extent(stream, subjects.blob(kind, run))).messages:
                    continue
                await self._bus.delete_orphan_chunks(
                    stream, before_ns=before_ns, note=partial(self._list_orphans, stream)
                )
            self._sweep_s = now

    async def _list_orphans(self, stream: str, seqs: Sequence[int]) -> None:
        """Record that `seqs` hold nothing of use: otherwise they would count as lost."""
        await update_record(self._bus, self._service.run, lambda old: old.with_orphans(stream, seqs))

    async def _trim_calls(self) -> None:
        """Delete calls of conversations that are at their end, or were left behind for long."""
        if self._conversations:
            await self._drop_conversations()
        else:
            await self._delete_calls()
        self.metrics["flow/conversations"] = len(self._conversations)
        self.metrics["flow/conversations_dropped"] = self._conversations.dropped

    async def _drop_conversations(self) -> None:
        """Delete calls of conversations that are at their end, or were left behind for long.

        If the stream is too full all the same, conversations are given up: those left behind first, the oldest before
        the others. One that a process works on goes on, but not beyond a kill.
        """
        retention = self._settings.retention
        _, short = self._budget.pressure(CALLS)
        self._conversations.drop_older(await self._bus.server_time_ns() - int(retention.calls_after_s * 1e9))
        gone = await self._delete_calls()
        usage = await self._bus.usage(CALLS)
        # what is stored of conversations under way is promised as well, so the promises do not count here
        full = usage.bytes > retention.trim_at * usage.max_bytes > 0
        excess = math.ceil(usage.bytes - retention.trim_to * usage.max_bytes) if full else 0
        short, gone = max(0, short - gone), 0
        while gone < max(excess, short) and self._conversations.drop_oldest(leased=gone < excess):
            gone += await self._delete_calls()

    async def _delete_calls(self) -> int:
        """Delete what lies below the oldest conversation of each environment; return how many bytes went."""
        limits = {
            subjects.call(self._service.run, env): self._conversations.lowest(env)
            for env in self._conversations.environments()
        }
        due = {subject: limit for subject, limit in limits.items() if limit > self._done.get(subject, 1)}
        if not due:
            return 0
        before = (await self._bus.usage(CALLS)).bytes
        await self._agree_on_calls(max(due.values()))
        for subject, limit in due.items():
            self._count(CALLS, "messages", await self._bus.trim(CALLS, [subject], before=limit))
            self._done[subject] = limit
        size = max(0, before - (await self._bus.usage(CALLS)).bytes)
        self._count(CALLS, "bytes", size)
        return size

    async def _agree_on_calls(self, reached: int) -> None:
        """Record that calls below `reached` may be gone. No hold can keep them: only a process under way needs them."""
        now_ns = await self._bus.server_time_ns()

        def update(old: Retention) -> Retention:
            new = self._lapsed(old, now_ns)
            return new.replace(trimmed={**new.trimmed, CALLS: max(new.trimmed.get(CALLS, 1), reached)})

        await update_record(self._bus, self._service.run, update)

    # deletion that makes room

    async def _relieve(self, stream: str) -> None:
        """Trim a stream that is too full, and report whether that was possible."""
        excess, short = self._budget.pressure(stream)
        gone, why = 0, None
        if excess > 0:
            claimed = await self.readers.claims()
            gone, record = await self._trim(stream, excess, claimed)
            if short > gone and await self._send_away(stream, record):
                more, record = await self._trim(stream, excess - gone, claimed)
                gone += more
            if gone < excess:
                why = await self._why(stream, excess - gone, [*claimed, *retention_floor.hold_claims(record.holds)])
        self._budget.explain(stream, why)
        if why is None:
            self.metrics.pop(f"flow/held_from/{stream}", None)
        stopped = why is not None and short > gone
        full = "has no room left:" if self._budget.is_mostly_promised(stream) else "is full, and"
        self._say(stream, f"no group is admitted: stream {stream} {full} {why}" if stopped else None)

    async def _trim(self, stream: str, excess: int, claimed: Sequence[RetentionClaim]) -> tuple[int, Retention]:
        """Delete the oldest messages until `excess` bytes are gone or no more may go; return how many bytes went.

        Bytes that others stored meanwhile reduce that figure.
        """
        now_ns = await self._bus.server_time_ns()
        record = await update_record(self._bus, self._service.run, lambda old: self._lapsed(old, now_ns))
        names = self._names(stream)
        first = now = await self._bus.usage(stream)
        end = await self._old_enough(stream, names, now.last + 1)
        cut, advances = record.trimmed.get(stream, 1), bool(names)
        while advances and first.bytes - now.bytes < excess:
            # as far as needed if bytes were spread evenly; then the figures are read again
            missing = excess - (first.bytes - now.bytes)
            cut = min(end, cut + max(1, (now.last + 1 - cut) * missing // max(now.bytes, 1)))
            before, record = await self._agree(stream, names, claimed, cut)
            advances = False
            for subject, limit in before.items():
                if limit > self._done.get(subject, 1):
                    advances = True
                    self._count(stream, "messages", await self._bus.trim(stream, [subject], before=limit))
                    self._done[subject] = limit
            now = await self._bus.usage(stream)
        self._count(stream, "bytes", max(0, first.bytes - now.bytes))
        self.metrics[f"flow/trimmed_below/{stream}"] = record.trimmed.get(stream, 1)
        return first.bytes - now.bytes, record

    async def _agree(
        self, stream: str, names: Sequence[str], claimed: Sequence[RetentionClaim], cut: int
    ) -> tuple[dict[str, int], Retention]:
        """Record how far history may be deleted, up to `cut`; return that by subject, and the new record."""
        before: dict[str, int] = {}
        now_ns = await self._bus.server_time_ns()

        def update(old: Retention) -> Retention:
            new = self._lapsed(old, now_ns)
            held = [*claimed, *retention_floor.hold_claims(new.holds)]
            before.update(
                {subject: min(cut, retention_floor.claims_on(held, stream, subject)[0].needs) for subject in names}
            )
            reached = max(new.trimmed.get(stream, 1), *before.values())
            return new.replace(trimmed={**new.trimmed, stream: reached})

        record = await update_record(self._bus, self._service.run, update)
        return before, record

    async def _send_away(self, stream: str, record: Retention) -> bool:
        """Drop the holds on a stream that yield to the run, and return whether there were any."""
        names = {name for name, hold in record.holds.items() if hold.yields and stream in hold.needs}
        for name in names:
            log.warning("hold %s (%s) gives way: the run needs the room", name, record.holds[name].about)
        if names:
            await update_record(
                self._bus,
                self._service.run,
                lambda old: old.replace(holds={name: hold for name, hold in old.holds.items() if name not in names}),
            )
        return bool(names)

    def _lapsed(self, old: Retention, now_ns: int) -> Retention:
        """Return the record without holds that were not renewed. Raises `FencedError` if it is another governor's.

        `now_ns` is the server's: a deletion by mistake is final, so no other clock is good enough.
        """
        if old.term != self._service.instance:
            raise FencedError(f"governor {old.term} has taken over trimming of run {old.run}")
        lapsed = {name for name, hold in old.holds.items() if hold.expires_ns <= now_ns}
        for name in lapsed:
            log.warning("hold %s (%s) was not renewed and has lapsed", name, old.holds[name].about)
        return old.replace(holds={name: hold for name, hold in old.holds.items() if name not in lapsed})

    def _names(self, stream: str) -> list[str]:
        return retention_floor.trimmable(
            stream, self._service.run, self._service.revision, self._settings.readers.environments
        )

    async def _old_enough(self, stream: str, names: Sequence[str], end: int) -> int:
        """Return a sequence below which all messages have the minimum age; a binary search, since times rise."""
        age_s = self._settings.retention.min_age_s
        if not age_s or not names:
            return end
        born_ns = await self._bus.server_time_ns() - int(age_s * 1e9)
        low = 1
        while low < end:
            middle = (low + end) // 2
            message = await self._first(stream, names, middle)
            if message is None or message.time_ns > born_ns:
                end = middle
            else:
                low = message.seq + 1
        return low

    async def _first(self, stream: str, filters: Sequence[str], start: int) -> StoredMessage | None:
        """Return the first message on `filters` at or after `start`, without its data."""
        async with self._bus.read(stream, filters, start=start, headers_only=True, follow=False) as messages:
            async for message in messages:
                return message
        return None

    # reports

    async def _why(self, stream: str, missing: int, claimed: Sequence[RetentionClaim]) -> str:
        """Return what keeps `missing` more bytes from being trimmed, and what to do."""
        budget = f"raise streams.{stream.lower()}_bytes"
        if stream == LEDGER:
            return f"the ledger is never trimmed: {budget}"
        usage, first = await self._bus.usage(stream), None
        holders: dict[str, str] = {}
        for needs, name in sorted(
            (retention_floor.claims_on(claimed, stream, name)[0].needs, name) for name in self._names(stream)
        ):
            held = await self._first(stream, [name], needs) if needs <= usage.last else None
            if held is None:
                continue  # nothing is held there
            first = first or held
            # readers in the way: those that need any of the missing bytes, as if bytes were spread evenly
            enough = first.seq + (usage.last + 1 - first.seq) * missing // max(usage.bytes, 1)
            for claim in retention_floor.claims_on(claimed, stream, name):
                if claim.needs <= max(held.seq, enough):
                    holders.setdefault(claim.holder, f"{claim.holder} ({name} from {max(claim.needs, held.seq)} on)")
        if first is None and self._budget.is_mostly_promised(stream):
            return self._budget.explain_promises(stream)
        if first is None and self._settings.retention.min_age_s:
            return f"what is left is younger than flow.retention.min_age_s: wait, or {budget}"
        if first is None:
            return f"what is left is of other revisions: delete what is not needed of them (`lachesis gc`), or {budget}"
        self.metrics[f"flow/held_from/{stream}"] = first.seq
        most = [
            *list(holders.values())[:_MAX_NAMED_HOLDERS],
            *(["others"] if len(holders) > _MAX_NAMED_HOLDERS else []),
        ]
        return f"history is still needed by {', '.join(most)}: see that they go on, or {budget}"

    def _say(self, stream: str, stopped: str | None) -> None:
        """Report why producers have to wait for a stream, None if they need not; log when that begins and ends."""
        before = self._stopped.pop(stream, None)
        if stopped is not None:
            self._stopped[stream] = stopped
            if before is None:
                log.warning("%s", stopped)
            self._service.mark_waiting("backpressure", "; ".join(self._stopped.values()))
        elif before is not None:
            log.info("stream %s has room again", stream)
            if not self._stopped:
                self._service.mark_ok()

    def _count(self, stream: str, what: str, amount: int) -> None:
        name = f"flow/trimmed_{what}/{stream}"
        self.metrics[name] = self.metrics.get(name, 0) + amount
