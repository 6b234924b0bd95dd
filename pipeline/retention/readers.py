"""Finds how far the readers of a run's history have read, from the broker and the ledger.

All these positions only move forward, so a position that was read a moment too early is at worst too low.
"""

from collections.abc import Iterable
from typing import TypeVar

from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.retention import retention_floor
from lachesis.pipeline.retention.retention_floor import (
    RetentionClaim,
    RetentionInputs,
    StageProgress,
    UntrainedReferences,
)
from lachesis.pipeline.retention.settings import ReaderSettings
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.alerts import AlertEvent, SentAlerts
from lachesis.schemas.annotations import CurriculumEvent, RewardEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import ROLLOUT_HEADER
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, TEACHER

__all__ = ["Readers"]

E = TypeVar("E", RewardEvent, CurriculumEvent, AlertEvent)


class Readers:
    """Feed it the ledger's entries and, through `untrained_references`, the trainer's reports."""

    def __init__(self, service: Service, settings: ReaderSettings, gone: Iterable[str] = ()) -> None:
        """`gone`: environments that the run no longer has, whose history its services still read."""
        self.untrained_references = UntrainedReferences()
        self._bus = service.bus
        self._run = service.run
        self._revision = service.revision
        gone = list(gone)
        self._environments = [*settings.environments, *gone]
        self._learned = [*settings.learned, *(gone if settings.learns_names else ())]  # nothing draws their tasks here
        self._has_teacher = settings.has_teacher
        self._has_health = settings.has_health
        self._has_webhook = settings.has_webhook
        self._watermark = 0
        self._events_cursor = 0
        self._logprobs = 1

    def entry(self, entry: LedgerEntry) -> None:
        """Record a new entry of the ledger, or its last one."""
        self.untrained_references.record_entry(entry)
        self._watermark, self._events_cursor = entry.watermark, entry.events_cursor

    async def claims(self) -> list[RetentionClaim]:
        """Return the claims of the run's own services. Raises `SchemaError` if a commit cannot be read."""
        return retention_floor.claims(await self.facts(), self._run, self._revision, self._environments)

    async def facts(self) -> RetentionInputs:
        """Return the readers' positions. Raises as `claims` does."""
        # together, before anything is awaited: later entries refer only to rollouts above this watermark
        watermark, events_cursor = self._watermark, self._events_cursor
        lowest_untrained = self.untrained_references.lowest_seqs()
        return RetentionInputs(
            watermark=watermark,
            events_cursor=events_cursor,
            batched=lowest_untrained,
            acknowledged={
                stage: await self._acknowledged(stage) for stage in ("scorer", *["teacher"] * self._has_teacher)
            },
            normalizers={
                env: await self._committed("normalizer", "reward", RewardEvent, env) for env in self._environments
            },
            curricula={
                env: await self._committed("curriculum", "curriculum", CurriculumEvent, env) for env in self._learned
            },
            monitors={env: await self._committed("health", "alert", AlertEvent, env) for env in self._environments}
            if self._has_health
            else None,
            webhook=await self._sent_alerts() if self._has_webhook else None,
            logprobs=await self._settled_logprobs(watermark),
        )

    async def _sent_alerts(self) -> int:
        entry = await self._bus.value(keys.webhook(self._revision))
        return 0 if entry is None else decode(SentAlerts, entry.value).seq

    async def _acknowledged(self, stage: str) -> int:
        try:
            lag = await self._bus.lag(ROLLOUTS, subjects.durable(stage, self._run, self._revision))
        except NotFoundError:
            return 0  # it has never run
        return lag.ack_floor

    async def _committed(self, stage: str, kind: subjects.Kind, event: type[E], env: str) -> StageProgress:
        state = subjects.state(self._run, stage, self._revision, env)
        snapshot, _, _ = await read_last_event(
            self._bus,
            LEDGER,
            state,
            StateSnapshot,
            lambda one: one.stage == stage,
        )
        subject = subjects.event(kind, self._run, self._revision, env)
        last, _, _ = await read_last_event(
            self._bus,
            EVENTS,
            subject,
            event,
            lambda one: (one.run, one.env) == (self._run, env),
        )
        if last is None:
            return StageProgress()
        return StageProgress(last.commit.cursors, snapshot.covers if snapshot else 0)

    async def _settled_logprobs(self, watermark: int) -> int:
        """Return the sequence of TEACHER below which every message belongs to a rollout with an outcome."""
        filters = [subjects.logprobs(self._run, self._revision)]
        async with self._bus.read(TEACHER, filters, start=self._logprobs, headers_only=True, follow=False) as messages:
            async for message in messages:
                rollout = message.headers.get(ROLLOUT_HEADER, "")
                if not rollout.isdecimal() or int(rollout) > watermark:
                    return message.seq
                self._logprobs = message.seq + 1
        return self._logprobs
