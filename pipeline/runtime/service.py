"""Runs a service: a named process (or part of one) on the bus, with heartbeats, drain and retries.

Guarantees that a heartbeat leaves once a second while the service lives, and at once when it has started; and that
`draining` is set, once and for good, when it is requested to stop; loops end at the next safe point after that.
"""

import logging
import math
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.newer_writers import follow_writers
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import SHORTAGES
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.errors import InfrastructureError, StartupError, StreamFullError, UnreadableAnswerError
from lachesis.pipeline.notices.facts import held_up_by
from lachesis.pipeline.runtime.blocked_loop import LoopHolders
from lachesis.pipeline.runtime.retries import OUTAGE_POLICY, OutageRetries, RetryWait, retry_outages
from lachesis.pipeline.runtime.service_metrics import ProblemDetails, ServiceMetrics
from lachesis.pipeline.runtime.shown_stall import ShownStall
from lachesis.pipeline.runtime.shown_vitals import shown_vitals
from lachesis.pipeline.telemetry.figures import ServiceFigures
from lachesis.pipeline.telemetry.performance import CallRecord
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import codec, subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat

__all__ = ["HeldLeases", "Service", "open_service"]

log = logging.getLogger("lachesis")

HEARTBEAT_S = 1.0
HELD_LIMIT_S = 60.0
_UNREADABLE_S = 8.0
"""Seconds after an answer that made no sense for which that is said: pauses between two tries are shorter."""
_TELEMETRY_CURE = "`lachesis doctor` tries the receiver; the run does without it"
_DISK = "disk"
_START = "start"
"""Topic of the note that says what a start is busy with."""


class HeldLeases(Protocol):
    """Leases that a service holds. `renew_s`: seconds between two renewals."""

    renew_s: float

    async def renew_over(self, bus: Bus, timeout_s: float) -> None:
        """Renew each once, over another connection: for another thread, while this one's loop is held."""


class Service:
    """What every stage is given.

    `replica` names a process among those of one name and stays the same over restarts; `instance` is unique to this
    life of the service, so it serves as writer term too.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        run: str,
        revision: str = subjects.LIVE,
        *,
        replica: str = "1",
        tracing: Tracing | None = None,
    ) -> None:
        self.bus = bus
        self.name = subjects.check_name("service", name)
        self.run = subjects.check_name("run", run)
        self.revision = subjects.check_name("revision", revision)
        self.replica = replica
        self.instance = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.vitals = ServiceMetrics()
        self.tracing = tracing or Tracing()
        self.began_ns = time.time_ns()
        self.started = anyio.Event()
        self.draining = anyio.Event()
        self.last_beat: Heartbeat | None = None
        """What was said last; another thread may say it again while the event loop is held."""
        self.alive_file: Path | None = None
        """What is touched after each heartbeat."""
        self.leases: list[HeldLeases] = []
        """What is renewed for it while it cannot."""
        self.loop_holders: LoopHolders | None = None
        """What knows the code that it calls on the event loop."""
        self.held_limit_s = HELD_LIMIT_S
        """Seconds for which code may hold the event loop before heartbeats for the service stop."""
        self._stall = ShownStall()

    def now_ns(self) -> int:
        """Return the time for stamps, Unix ns by the server's clock."""
        return self.tracing.clock.now_ns()

    def record_call(
        self, start_ns: int, items: int, *, failed: bool = False, payload: int | None = None, plain: int | None = None
    ) -> None:
        """Count one call for `api_perf/*`, begun at `start_ns` (as `now_ns`) and done now; see `CallRecord`."""
        seconds = (self.now_ns() - start_ns) / 1e9
        self.tracing.performance["api_perf"].record(
            CallRecord(time.monotonic(), seconds, items, failed, payload, plain)
        )

    def requested(self, call: CallRecord) -> None:
        """Count one request to an inference server, for `api_perf/inference/*`."""
        self.tracing.performance["api_perf/inference"].record(call)

    def answered(self, call: CallRecord) -> None:
        """Count one HTTP request that the service answered, for `api_perf/http/*`."""
        self.tracing.performance["api_perf/http"].record(call)

    async def heartbeat(self) -> None:
        """Broadcast the service's figures now, and export them where telemetry goes."""
        vitals, sink = self.vitals, self.tracing.sink
        unanswered = self.bus.unanswered
        self.set_note("unanswered requests", unanswered.summary(time.monotonic()))
        shortage = SHORTAGES.longest_wait_text
        self.set_problem(_DISK, shortage, held_up=held_up_by(self.name), stops=True)
        self.set_problem("telemetry", None if sink is None else sink.problem, mend=_TELEMETRY_CURE)
        metrics = {**vitals.metrics, "bus/unanswered_requests": float(unanswered.count), **self.tracing.figures()}
        stage = self._stall.apply(self.bus.stall, vitals.report(self.name))
        if shortage is not None:  # it says more than that the server is slow, whose disk that may be as well
            state = "draining" if stage.state == "draining" else "waiting"
            since_ns = stage.since_ns if stage.state == state else None
            stage = msgspec.structs.replace(stage, state=state, note=shortage, since_ns=since_ns)
        stage = shown_vitals(stage)
        beat = Heartbeat(
            run=self.run,
            service=self.name,
            instance=self.instance,
            pid=os.getpid(),
            time_ns=time.time_ns(),
            stage=stage,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            slow=dict(vitals.slow),
            stopped=dict(vitals.stopped),
            replica=self.replica,
            host=socket.gethostname(),
            schema_version=codec.SCHEMA_VERSION,
            acknowledged=dict(self.bus.acknowledged),
        )
        if sink is not None:
            waits, processes = vitals.wait_exemplars.newest(), vitals.process_exemplars.newest()
            sink.observe(ServiceFigures(beat.stage, beat.metrics, self.began_ns, beat.time_ns, waits, processes))
        self.last_beat = beat
        await self.bus.broadcast(subjects.heartbeat(self.run, self.name, self.instance), encode(beat))

    def touch_alive_file(self) -> None:
        """Say to probes that the service lives. Raises `StartupError` where the file cannot be written."""
        if self.alive_file is None:
            return
        try:
            self.alive_file.touch()
        except OSError as error:
            text = f"services.alive_file: {self.alive_file} cannot be written: {error.strerror or error}"
            raise StartupError(text) from error

    def drain(self) -> None:
        """Ask the service to finish what it holds and to end."""
        self.vitals.state = "draining"
        self.draining.set()

    def retrying(self, what: str, *, patience_s: float | None = None) -> OutageRetries:
        """Return what retries `InfrastructureError` with backoff until the service drains: call or iterate it.

        The last error is raised when it does, or after `patience_s` seconds: the caller gives its work back.
        """
        policy = replace(OUTAGE_POLICY, give_up_s=patience_s)
        return retry_outages(what, self.report_wait, policy=policy, draining=self.draining)

    def report_wait(self, wait: RetryWait) -> None:
        """Count a further attempt, and say in the heartbeat what it is for, since when and why."""
        full = isinstance(wait.error, StreamFullError)
        if isinstance(wait.error, UnreadableAnswerError):
            mend = "see what stands at that address; it is requested again until it answers properly"
            self.set_problem("unreadable answers", str(wait.error), mend=mend, for_s=_UNREADABLE_S)
        self.mark_waiting("backpressure" if full else "waiting", str(wait))
        self.vitals.retried += 1

    @asynccontextmanager
    async def until_drained(self) -> AsyncIterator[None]:
        """Cancel the body once the service drains: around waits for what may never come.

        An `InfrastructureError` that the body raises then (`retrying` does) says no more than that, and is dropped.
        """

        async def end() -> None:
            await self.draining.wait()
            tasks.cancel_scope.cancel()

        try:
            async with background() as tasks:
                tasks.start_soon(end)
                yield
        except InfrastructureError:
            if not self.draining.is_set():
                raise

    def mark_waiting(self, state: Literal["waiting", "backpressure"], note: str | None) -> None:
        """Mark the service as waiting for something. A draining service stays marked as draining."""
        self.set_note(_START, None)
        if not self.draining.is_set():
            self.vitals.state = state
            self.started.set()
        self.vitals.waits_for = note

    async def starts_with(self, what: str) -> None:
        """Say what the start is busy with, until `mark_waiting` or `mark_ok`.

        The heartbeat leaves at once, since the start may block the event loop.
        """
        self.set_note(_START, what)
        await self.heartbeat()

    def mark_ok(self) -> None:
        """Mark the service as ok again after retries."""
        self.set_note(_START, None)
        if self.vitals.state in {"waiting", "starting", "backpressure"}:
            self.vitals.state = "ok"
            self.started.set()
        self.vitals.waits_for = None

    def set_problem(
        self,
        topic: str,
        text: str | None,
        *,
        why: str = "",
        mend: str = "",
        held_up: Sequence[str] = (),
        stops: bool = False,
        for_s: float = math.inf,
        version: str = "",
    ) -> None:
        """Raise a notice (see `Notice`): what goes wrong while the service goes on, and a person has to mend.

        `topic` stays the same while it holds, however its text changes. None: it no longer holds, nor does it `for_s`
        seconds after it was said last.
        """
        if text is None:
            self.vitals.problems.pop(topic, None)
            self.vitals.problem_details.pop(topic, None)
        else:
            self.vitals.problems[topic] = text
            self.vitals.problem_details[topic] = ProblemDetails(
                why, mend, tuple(held_up), stops, time.monotonic() + for_s, version
            )

    def set_note(self, topic: str, text: str | None) -> None:
        """Say something in the heartbeat that keeps nothing from going on; None: it no longer holds."""
        if text is None:
            self.vitals.notes.pop(topic, None)
        else:
            self.vitals.notes[topic] = text


@asynccontextmanager
async def open_service(
    bus: Bus,
    name: str,
    run: str,
    revision: str = subjects.LIVE,
    *,
    replica: str = "1",
    tracing: Tracing | None = None,
    alive_file: Path | None = None,
) -> AsyncIterator[Service]:
    """Yield a service that sends heartbeats until the context ends; the last one says that it drained.

    `alive_file` is touched after each, for probes that look at its age.
    """
    service = Service(bus, name, run, revision, replica=replica, tracing=tracing)
    service.alive_file = alive_file

    async def beat() -> None:
        while True:
            await service.heartbeat()
            service.touch_alive_file()
            await sleep_until_tick(HEARTBEAT_S)

    async def announce() -> None:
        await service.started.wait()
        await service.heartbeat()

    async with background() as tasks:
        tasks.start_soon(beat)
        tasks.start_soon(announce)
        tasks.start_soon(follow_writers, bus, run)
        yield service
        await service.heartbeat()
