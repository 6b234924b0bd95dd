"""Serves batches to trainers that request them over HTTP.

The record of batches handed out, received and trained survives any kill. Guarantees: a batch is handed to one member of
a consumer; until its reply was received, the member gets that batch again; and it counts as trained only after two more
requests of the member: the first one is answered "none" (which ends the collecting of a stock trainer, so that it
trains), and the second one follows the step. Trained batches are reported, and the run's policy version rises with
them, as with the run's own trainer.
"""

import logging
import os
import re
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.last_event import decode_owned, read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.errors import LedgerError
from lachesis.pipeline.extensions.atropos.gateway.logic.handed_batches import Consumer
from lachesis.pipeline.extensions.atropos.gateway.logic.scored import to_scored
from lachesis.pipeline.extensions.atropos.gateway.protocol import RegisterTrainer
from lachesis.pipeline.extensions.atropos.gateway.settings import GatewaySettings
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import Payload, fetch_groups, find_position
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import MAX_DROP_REASON_CHARS, GroupDrops, LedgerEntry, TrainReport

__all__ = ["HandedReply", "NotRegisteredError", "Trainers"]

log = logging.getLogger("lachesis")

_PATIENCE_S = 3.0
"""Seconds for which a request waits out an outage of the broker; the usual trainer waits 10 for a reply."""
_ANYBODY = ("", "lachesis")
"""User names of the run's trainer: none, and the one in `gateway.url`."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_CONSUMERS = 16
_MAX_MEMBERS = 64


class NotRegisteredError(DataError):
    """Raised when a trainer that has not registered requests a batch."""


@dataclass(frozen=True, slots=True)
class HandedReply:
    """A reply that carries a batch as JSON, with its owner. `attempt` counts the replies to its member."""

    consumer: str
    member: str
    number: int
    attempt: int
    data: bytes


class Trainers:
    """The trainers of one run by the user name that they send.

    `NAME.MEMBER`: the members of one name get disjoint batches; every name reads the whole ledger. The name of the
    run's trainer (`training.name`; no user name means the same) reports what it trains; the others do not.
    """

    def __init__(self, service: Service, settings: GatewaySettings, store: GatewayStore) -> None:
        self._service = service
        self._settings = settings
        self._store = store
        self._trainer = settings.trainer
        self._consumers: dict[str, Consumer] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._answered_none: set[tuple[str, str]] = set()
        self._attempts: Counter[tuple[str, str]] = Counter()
        self._seen: dict[str, int] = {}
        """By consumer: the sequence of the newest entry when there was no further batch."""
        self._settled = False
        self._report: TrainReport | None = None
        self._report_seq: int | None = None
        self._encoding = anyio.CapacityLimiter(1)
        self.latest: dict[str, Any] | None = None

    @property
    def registered(self) -> RegisterTrainer | None:
        """The newest settings of the run's trainer."""
        consumer = self._consumers.get(self._trainer)
        return next(reversed(consumer.registered.values()), None) if consumer else None

    async def open(self) -> None:
        """Take over what an earlier gateway knew of the run's trainer."""
        async with self._lock(self._trainer):
            await self._consumer(self._trainer)

    def member_of(self, user: str) -> tuple[str, str]:
        """Return the consumer and the member that a user name stands for. Raises `DataError`."""
        name, dot, member = user.partition(".")
        name = self._trainer if name in _ANYBODY else name
        if not _NAME.fullmatch(name) or (dot and not _NAME.fullmatch(member)):
            raise DataError(
                f"user name {user[:80]!r}: a trainer is called NAME or NAME.MEMBER, of letters, digits, '_' and '-'"
            )
        return name, member

    async def register(self, user: str, request: RegisterTrainer) -> int:
        """Record a trainer, and return its id, which is the same each time. Raises `DataError`."""
        name, member = self.member_of(user)
        wanted = self._settings.batch_size
        if request.batch_size != wanted:
            raise DataError(
                f"batch_size: {request.batch_size}, but batches of this run have {wanted} sequences; set "
                f"batching.batch_size = {request.batch_size} in its configuration, or start the trainer with {wanted}"
            )
        if name not in self._consumers and len(self._consumers) >= _MAX_CONSUMERS:
            raise DataError(f"user name {user!r}: {_MAX_CONSUMERS} others read this run already; share the name of one")
        async with self._lock(name):
            consumer = await self._consumer(name)
            if len(consumer.registered) >= _MAX_MEMBERS and member not in consumer.registered:
                raise DataError(f"{_MAX_MEMBERS} trainers share {name!r}; GET /reset_data forgets them")
            self._answered_none.discard((name, member))
            await self._set(name, consumer.register(member, request))
            await self._settle(name)
        return uuid.uuid5(uuid.NAMESPACE_URL, f"lachesis:{self._service.run}:{name}.{member}").int

    async def forget_members(self) -> None:
        """Forget registrations. Batches handed out, and positions, stay."""
        for name in list(self._consumers):
            async with self._lock(name):
                await self._set(name, (await self._consumer(name)).forget_members())

    async def next_batch(self, user: str) -> HandedReply | None:
        """Return the batch to send to a trainer now; None if it has to retry.

        Raises `NotRegisteredError`, and `InfrastructureError` if the broker is unavailable.
        """
        name, member = self.member_of(user)
        async with self._lock(name):
            stored = name in self._consumers or await self._patiently("read who trains")(self._store.consumer, name)
            if not stored or member not in (await self._consumer(name)).registered:
                raise NotRegisteredError("Trainer not registered. Call /register first.")
            await self._settle(name)
            held = self._consumers[name].handed.get(member)
            if held is not None and held.received:
                if (name, member) not in self._answered_none:
                    self._answered_none.add((name, member))
                    return None
                await self._train(name, member)
                held = None
            if held is not None:
                message = await self._patiently("read the ledger")(self._service.bus.get, subjects.LEDGER, held.seq)
                groups, _ = await self._groups(decode(LedgerEntry, message.data))
                if groups:
                    return self._reply(name, member, held.number, groups)
                await self._train(name, member)  # its payloads are gone by now, which the log says
            return await self._hand_out(name, member)

    async def record_receipt(self, reply: HandedReply, *, received: bool) -> bool:
        """Store whether a reply reached its trainer.

        Return False, and store nothing, if a later one is under way.
        """
        async with self._lock(reply.consumer):
            consumer = await self._consumer(reply.consumer)
            if self._attempts[reply.consumer, reply.member] != reply.attempt:
                return False
            self._answered_none.discard((reply.consumer, reply.member))
            await self._set(reply.consumer, consumer.record_receipt(reply.member, reply.number, received=received))
            return True

    # handing out

    async def _hand_out(self, name: str, member: str) -> HandedReply | None:
        """Hand out the next batch of which something can be trained; None: there is none yet."""
        while True:
            found = await self._next_entry(name)
            if found is None:
                return None
            entry, seq, consumer = found
            groups, dropped = await self._groups(entry)
            if groups:
                await self._set(name, consumer.hand_out(member, entry, seq, dropped))
                return self._reply(name, member, entry.next_batch - 1, groups)
            await self._set(name, consumer.void(entry, seq, dropped[0].reason if dropped else "it has no groups"))
            await self._settle(name)

    def _reply(self, name: str, member: str, number: int, groups: list[bytes]) -> HandedReply:
        self._attempts[name, member] += 1
        first, *further = groups
        parts = [b'{"batch":[', first, *chain.from_iterable((b",", group) for group in further), b"]}"]
        return HandedReply(name, member, number, self._attempts[name, member], b"".join(parts))

    async def _next_entry(self, name: str) -> tuple[LedgerEntry, int, Consumer] | None:
        """Return the next entry with a batch, its place, and the consumer as of just before it; None: there is none."""
        bus, run, consumer = self._service.bus, self._service.run, self._consumers[name]
        subject = subjects.ledger(run, self._trainer)
        last = await self._patiently("read the ledger")(bus.last, subjects.LEDGER, subject)
        newest = last.seq if last else 0
        if newest < consumer.seq:
            raise LedgerError(f"{subject} ends before what was handed out: the broker lost history; restore its store")
        if newest <= max(consumer.seq, self._seen.get(name, 0)):
            return None
        left_out = await self._patiently("read what is left out")(read_skipped, bus)
        async with bus.read(subjects.LEDGER, [subject], start=consumer.seq + 1, follow=False) as messages:
            async for message in messages:
                self._seen[name] = message.seq
                ours = partial(_is_of, run, self._trainer, consumer.entries)
                entry = await decode_owned(bus, LedgerEntry, message, ours, left_out=left_out)
                if entry is not None and entry.batch is not None:
                    self._seen[name] = 0
                    return entry, message.seq, consumer
                if entry is not None:
                    consumer = consumer.read(entry, message.seq)
        return None

    async def _groups(self, entry: LedgerEntry) -> tuple[list[bytes], list[GroupDrops]]:
        """Return the groups of an entry's batch as JSON, and why others of it cannot be trained."""
        if entry.batch is None:
            return [], []
        number = entry.batch.number
        found, failures = await self._patiently("fetch a batch")(fetch_groups, self._service.bus, entry.batch)
        reasons = {seq: str(error) for seq, error in failures.items()}
        ids = {registered.name: env_id for env_id, registered in self._store.registry.registered.items()}
        groups, unfit, latest = await anyio.to_thread.run_sync(_convert, found, ids, limiter=self._encoding)
        self.latest = latest or self.latest
        for seq, reason in (reasons | unfit).items():
            log.warning("batch %d lacks the group at %d: %s", number, seq, reason)
        drops = [GroupDrops(number, [seq], why[:MAX_DROP_REASON_CHARS]) for seq, why in (reasons | unfit).items()]
        return groups, drops

    # stored state

    def _lock(self, name: str) -> anyio.Lock:
        return self._locks.setdefault(name, anyio.Lock())

    def _patiently(self, what: str) -> Any:
        return self._service.retrying(what, patience_s=_PATIENCE_S)

    async def _consumer(self, name: str) -> Consumer:
        """Return what is known of a consumer, read from the bucket, or from the last report, the first time."""
        known = self._consumers.get(name)
        if known is not None:
            return known
        stored = await self._patiently("read the gateway's state")(self._store.consumer, name)
        if stored is None:
            stored = await self._first(name)
        return await self._set(name, stored)  # written at once, so that an earlier gateway can no longer change it

    async def _first(self, name: str) -> Consumer:
        fresh = Consumer(lineage=os.urandom(3).hex())
        report = await self._last_report() if name == self._trainer else None
        if report is None:
            return fresh
        position = LedgerPosition(report.ledger_index + 1, report.chain)
        seq = await self._patiently("read the ledger")(
            find_position, self._service.bus, self._service.run, self._trainer, position
        )
        return msgspec.structs.replace(
            fresh, entries=position.entries, digest=position.digest, seq=seq, next_batch=report.next_batch
        )

    async def _set(self, name: str, consumer: Consumer) -> Consumer:
        with anyio.CancelScope(shield=True):  # a write given up half-way would leave its revision unknown
            await self._patiently("store what trainers hold")(self._store.set_consumer, name, consumer)
        self._consumers[name] = consumer
        if name == self._trainer:
            self._settled = False
        return consumer

    # training

    async def _train(self, name: str, member: str) -> None:
        self._answered_none.discard((name, member))
        await self._set(name, self._consumers[name].train(member))
        await self._settle(name)

    async def _last_report(self) -> TrainReport | None:
        if self._report_seq is None:
            self._report, _, self._report_seq = await self._patiently("read the last report")(
                read_last_event,
                self._service.bus,
                subjects.LEDGER,
                self._report_subject,
                TrainReport,
                lambda report: report.run == self._service.run,
                newer="refuse",
            )
        return self._report

    @property
    def _report_subject(self) -> str:
        return subjects.state(self._service.run, "trainer", subjects.LIVE, self._trainer)

    async def _settle(self, name: str) -> None:
        """Report what the run's trainer has trained, and let the policy version follow; again after a kill between."""
        if name != self._trainer or self._settled:
            return
        consumer = self._consumers[name]
        registered = self.registered
        if registered is None:
            return
        trained = consumer.trained
        version = PolicyVersion(trained.next_batch, consumer.lineage, trained.position.digest[:12])
        report = await self._last_report()
        if trained.next_batch > (report.next_batch if report else 0):
            await self._commit(consumer, str(version), registered)
        entry = await self._patiently("read the policy")(self._service.bus.value, keys.POLICY)
        newest = decode(PolicyRecord, entry.value).policy_version if entry else None
        if newest is None or newest.step < trained.next_batch:
            record = PolicyRecord(
                run=self._service.run,
                version=str(version),
                weights=registered.checkpoint_dir,
                tokenizer_hash="",
                written_ns=time.time_ns(),
            )
            revision = entry.revision if entry else 0
            await self._patiently("publish the policy")(
                self._service.bus.put, keys.POLICY, encode(record), revision=revision
            )
        self._settled = True

    async def _commit(self, consumer: Consumer, version: str, registered: RegisterTrainer) -> None:
        trained, term = consumer.trained, f"gateway-{self._service.instance}"
        new = range(self._report.next_batch if self._report else 0, trained.next_batch)
        report = TrainReport(
            run=self._service.run,
            trainer=self._trainer,
            lineage=consumer.lineage,
            term=term,
            step=trained.next_batch,
            ledger_index=trained.position.entries - 1,
            chain=trained.position.digest,
            next_batch=trained.next_batch,
            policy_version=version,
            checkpoint=registered.checkpoint_dir,
            voids=[void for void in consumer.voids if void.batch in new],
            drops=[drops for drops in consumer.drops if drops.batch in new],
            written_ns=time.time_ns(),
        )
        with anyio.CancelScope(shield=True):
            self._report_seq = await self._patiently("report what is trained")(
                self._service.bus.commit,
                self._report_subject,
                encode(report),
                expected=self._report_seq,
                msg_id=f"report.{report.run}.{self._trainer}.{term}.{report.step}",
            )
        self._report = report
        if consumer.voids or consumer.drops:
            await self._set(self._trainer, consumer.reported(trained.next_batch))


def _is_of(run: str, trainer: str, follows: int, entry: LedgerEntry) -> bool:
    return (entry.run, entry.trainer) == (run, trainer) and entry.index >= follows


def _convert(payloads: list[Payload], ids: dict[str, int]) -> tuple[list[bytes], dict[int, str], dict[str, Any] | None]:
    """Return the groups as JSON, by sequence in ROLLOUTS why others cannot be trained, and the last group."""
    groups: list[bytes] = []
    unfit: dict[int, str] = {}
    latest = None
    for ref, group, _ in payloads:
        origin = group.metadata.get("gateway")
        env_id = ids.get(origin.get("name", "")) if isinstance(origin, dict) else None
        try:
            latest = to_scored(ref, group, env_id)
        except DataError as error:
            unfit[ref.seq] = str(error)
        else:
            groups.append(msgspec.json.encode(latest))
    return groups, unfit, latest
