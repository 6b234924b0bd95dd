"""Runs stateful stages: one fenced writer for each environment turns events into commits.

A commit holds outputs and the state change.

Reads messages of several streams, in bursts, each stream in its order. Writes events on one subject; each is one fenced
message with outputs, the change of the stage's state, and the positions from which a restart reads again. Guarantees:

* a start takes up the last snapshot and the commits after it, then reads again from the positions of the last commit:
  a process that is killed at any line repeats nothing and loses nothing;
* of two writers one is refused (`FencedError`) and ends; after an error the last message of the subject, as the leader
  has it, shows whether a commit was stored (`Bus.commit`);
* a bad message (`DataError`) is rejected, by default as a dead letter, and its neighbours are not. A message of a newer
  version (`VersionError`) ends the service, unread, if its writers say that they write that version; otherwise it is
  bad;
* infrastructure that fails is waited for. Once the service drains, the burst in hand is finished or left: what is not
  committed is read again by the next start.

A stage keeps its decisions in pure code that knows no bus. Its subclass of `StatefulStage` only feeds messages to that
code and writes the events that come out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import anyio

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.errors import InfrastructureError, LedgerError
from lachesis.pipeline.runtime.commitlog import CommitLog, RestoredState
from lachesis.pipeline.runtime.dead_letters import dead_letter, store_dead_letter
from lachesis.pipeline.runtime.inputs import InputSource, open_bursts
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.state import RESTORE_HINT
from lachesis.pipeline.runtime.stream_marks import check_marks
from lachesis.pipeline.telemetry.spans import Times
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit
from lachesis.schemas.codec import Event
from lachesis.schemas.errors import DataError, LachesisError, VersionError

__all__ = ["BackgroundTask", "CommitReceipt", "StatefulStage", "run_stateful"]


E = TypeVar("E", bound=Event)
BackgroundTask = Callable[[], Coroutine[Any, Any, None]]


_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a state raises that is not what its writer wrote."""


class CommitReceipt(NamedTuple):
    """Where a commit is stored, its size in bytes, and when it was sent and confirmed (Unix ns, as `now_ns`)."""

    seq: int
    size: int
    times: Times


class StatefulStage(ABC, Generic[E]):
    """One environment's writer: `open`, then `follow`.

    `cursors`: by stream, the first sequence to read again after a restart. Each commit stores them. `turn` is held
    while a burst is taken in. A task that writes beside the input holds it too.
    """

    name: ClassVar[str]
    """Names the stage in the subject of its state."""
    kind: ClassVar[subjects.Kind]
    """What it writes: names the subject of its events."""

    def __init__(self, service: Service, env: str, event: type[E], streams: Iterable[str]) -> None:
        self.service = service
        self.env = env
        self.cursors = dict.fromkeys(streams, 1)
        self.turn = anyio.Lock()
        self._event = event
        self._log: CommitLog[E]

    # what a stage is made of

    @abstractmethod
    async def restore(self, restored: RestoredState) -> None:
        """Take over the state that earlier writers committed; `cursors` are theirs already."""

    @abstractmethod
    def sources(self) -> Sequence[InputSource]:
        """Return what to read, from `cursors` on."""

    @abstractmethod
    async def feed(self, message: StoredMessage) -> None:
        """Take in one message. Raises `DataError` where it is bad, with the state as it was."""

    async def advance(self) -> None:
        """`write` what must not wait for the end of the burst: called after each message. By default nothing."""

    @abstractmethod
    async def commit(self) -> None:
        """`write` what became ready: called after each burst."""

    @abstractmethod
    def state(self) -> bytes:
        """Return the whole state as of the last commit."""

    def tasks(self) -> Sequence[BackgroundTask]:
        """Return what runs beside the input, until that ends."""
        return ()

    def report(self, event: E, receipt: CommitReceipt) -> None:
        """Put a commit that is stored into metrics, traces and logs."""

    async def reject(self, message: StoredMessage, error: DataError) -> None:
        """Handle a message that `feed` refused. By default it becomes a dead letter."""
        await store_dead_letter(self.service, dead_letter(self.service, message, "data", error))

    # what every stage does

    @property
    def subject(self) -> str:
        """The subject of the events."""
        return subjects.event(self.kind, self.service.run, self.service.revision, self.env)

    async def open(self, *, patience_s: float | None = None) -> None:
        """Take over what earlier writers committed. Raises `LedgerError` where a commit or its source is gone.

        `patience_s`: as in `check_marks`.
        """
        service = self.service
        self._log, restored = await CommitLog.open(
            service.bus,
            self._event,
            attrgetter("commit"),
            subject=self.subject,
            state_subject=subjects.state(service.run, self.name, service.revision, self.env),
            stage=self.name,
            term=service.instance,
        )
        check, writer = service.retrying("check that what was read is still there"), f"the {self.name} of {self.env}"
        await check(check_marks, service.bus, service.run, restored.read, writer=writer, patience_s=patience_s)
        self.cursors.update(restored.cursors)
        try:
            await self.restore(restored)
        except LachesisError as error:
            if not isinstance(error, DataError) or isinstance(error, VersionError):
                raise
            raise self._unreadable(str(error)) from error
        except _MALFORMED as error:
            raise self._unreadable(error_text(error)) from error

    def _unreadable(self, why: str) -> LedgerError:
        return LedgerError(
            f"the state of the {self.name} of {self.env}, in LEDGER and {self.subject}, cannot be read: "
            f"{why[:500].rstrip('.')}. {RESTORE_HINT}"
        )

    async def follow(self) -> None:
        """Take in what comes until the service drains. Raises `FencedError` when another writer takes over."""
        service = self.service
        async with open_bursts(service, self.sources()) as bursts, background() as tasks:
            for task in self.tasks():
                tasks.start_soon(task)
            service.mark_ok()
            async for burst in bursts:
                try:
                    await self.process_burst(burst)
                except InfrastructureError:
                    if service.draining.is_set():
                        return  # the next start reads it again
                    raise

    async def process_burst(self, burst: Sequence[StoredMessage]) -> None:
        """Take in a burst and commit what follows from it."""
        async with self.turn:
            for message in burst:
                await self.feed_or_reject(message)
                await self.advance()
            await self.commit()

    async def feed_or_reject(self, message: StoredMessage) -> None:
        """Take in one message, `reject` a bad one. Raises `VersionError` where a later build wrote it."""
        self._log.marks.record(message)
        try:
            await self.feed(message)
        except DataError as error:
            if isinstance(error, VersionError):
                await confirm_newer(self.service.bus, message, error)
            await self.reject(message, error)

    def next_commit(self, delta: bytes) -> Commit:
        """Return the commit to put into the next event.

        The change of state since the last one, and the cursors.
        """
        return self._log.next_commit(self.cursors, delta)

    async def write(self, event: E) -> None:
        """Store an event that holds `next_commit`, and the state where a snapshot is due.

        Raises `FencedError`, and `InfrastructureError` once the service drains.
        """
        service, log = self.service, self._log
        began_ns = service.now_ns()
        seq: int = await service.retrying(f"commit to {self.subject}")(log.append, event)
        service.mark_ok()
        self.report(event, CommitReceipt(seq, log.appended_bytes, (began_ns, service.now_ns())))
        if log.snapshot_due:
            await service.retrying("write a snapshot")(log.snapshot, self.cursors, self.state())


async def run_stateful(stages: Iterable[StatefulStage[E]]) -> None:
    """Run stages of one service, each on its own, until the service drains."""

    async def run(stage: StatefulStage[E]) -> None:
        try:
            await stage.open()
        except InfrastructureError:
            if stage.service.draining.is_set():
                return  # it was requested to end while it waited
            raise
        await stage.follow()

    async with anyio.create_task_group() as tasks:
        for stage in stages:
            tasks.start_soon(run, stage)
