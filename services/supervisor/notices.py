"""Folds what the supervisor hears and sees into notices, logs what begins and ends, and says it on.

Each notice is logged once when it begins and once when it is over. What holds is written into the run's folder, and
sent in a heartbeat of the supervisor's own, so that every command shows the same.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import anyio

from lachesis.pipeline.bus.disk_room import StoreFinding
from lachesis.pipeline.bus.embedded import SERVER_LOG
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.disk import SHORTAGES, DeferredFile
from lachesis.pipeline.common.machine_memory import free_on_machine, resident_bytes
from lachesis.pipeline.common.process_state import STOPPED_STATES, describe_stop, process_state
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.config.run import NATS_FOLDER, RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.changes import NoticeChanges, NoticeHistory, PastNotice
from lachesis.pipeline.notices.facts import Moment, ProcessFact
from lachesis.pipeline.notices.silence import ENDED
from lachesis.pipeline.notices.text import notice_line
from lachesis.pipeline.runtime.shown_vitals import shown_notice
from lachesis.pipeline.telemetry.heartbeat_log import SUPERVISOR
from lachesis.schemas import codec, subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.notices import MAX_NOTICES, Notice
from lachesis.services.observe.notices import disk_notices, exhaustion_notices, expected_run, step_durations
from lachesis.services.output import human_bytes
from lachesis.services.preflight.exhaustion import find_exhaustion
from lachesis.services.process.process_limits import ReachedLimit, reached_limits
from lachesis.services.run.notices_file import NoticesWriter

__all__ = ["RunNotices"]

log = logging.getLogger("lachesis")

_LOOK_S = 1.0
_PROBE_S = 2.0
_ANSWER_S = 4.0
"""Seconds in which the server must answer a question that takes milliseconds."""
_EXHAUSTION_S = 5.0
_MIN_FREE_BYTES = 512 << 20
"""Free memory of the machine below which everything slows down, and the kernel soon ends processes."""
_LEDGER_KEY = "ledger"


class RunNotices:
    """The notices of one run. `processes` says how its processes stand; `server_pid` which one its own server is."""

    def __init__(
        self,
        config: RunConfig,
        processes: Callable[[], Iterable[ProcessFact]],
        server_pid: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._processes = processes
        self._server_pid = server_pid
        self._board = NoticeBoard(expected_run(config))
        self._board.progress.seed(step_durations(config.path))
        self._changes = NoticeChanges()
        self._history = NoticeHistory()
        self._writer = NoticesWriter(config.path)
        self._instance = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._bus: NatsBus | None = None
        self._last_step_logged = False
        self._is_over = False
        self.ledger_broken = ""
        """How the ledger is broken, as the health service found it; empty: it is not known to be."""

    @property
    def history(self) -> list[PastNotice]:
        """All notices of this life of the supervisor."""
        return self._history.all()

    @property
    def file(self) -> DeferredFile:
        return self._writer.file

    def hear(self, beat: Heartbeat, *, evaluates: bool) -> None:
        """Take in a heartbeat. `evaluates`: the run has an evaluator that has not finished."""
        self._board.hear(beat, time.monotonic())
        if beat.service == "health" and beat.metrics.get("ledger/broken") and not self.ledger_broken:
            said = next((one for one in beat.stage.notices if one.key == _LEDGER_KEY), None)
            self.ledger_broken = (said.why if said is not None else beat.stage.note) or "its log says how"
        if beat.service == "trainer" and evaluates:
            self._report_last_step(beat)

    def silent_for_s(self, pid: int, *, since_s: float) -> float:
        """Return for how long a process that runs `since_s` has said nothing; 0 while the server is away."""
        now_s = time.monotonic()
        silent_s = self._board.silent_for_s(pid, now_s)
        return now_s - since_s if silent_s is None else silent_s

    def conclude(self) -> None:
        """Keep what holds now as what held in the end.

        From here on processes are silent because they are stopped.
        """
        self._is_over = True

    def report_disk(self, found: StoreFinding) -> None:
        """Take in how the disk of the run's own server stands."""
        self._board.report("disk", disk_notices(found))

    def report_logs(self, found: list[Notice]) -> None:
        """Take in which logs are cut."""
        self._board.report("logs", found)

    async def watch_run(self) -> None:
        """Look at the run once a second, until `conclude`."""
        while not self._is_over:
            await self._check_run()
            await sleep_until_tick(_LOOK_S)

    async def watch_server(self, bus: NatsBus) -> None:
        """Ask the server again and again whether it answers, and what is used up. Runs until cancelled."""
        self._bus, answered_ns, looked_s = bus, time.time_ns(), float("-inf")
        while True:
            with anyio.move_on_after(_ANSWER_S) as waiting:
                error = ""
                try:
                    await bus.usage(subjects.LEDGER)
                except InfrastructureError as failure:
                    error = str(failure)
            if waiting.cancelled_caught or error:
                self._board.report_server(self._server_notice(bus, error, answered_ns))
            else:
                answered_ns = time.time_ns()
                self._board.report_server(None)
                if time.monotonic() - looked_s > _EXHAUSTION_S:
                    looked_s = time.monotonic()
                    with anyio.move_on_after(_ANSWER_S), suppress(LachesisError):
                        found = await find_exhaustion(bus, self._config, (*subjects.STREAMS, subjects.BUCKET))
                        self._board.report("exhaustion", exhaustion_notices(found))
            await sleep_until_tick(_PROBE_S)

    def _server_notice(self, bus: NatsBus, error: str, answered_ns: int) -> Notice:
        pid = self._server_pid()
        state = "" if pid is None else process_state(pid)
        why, mend = str(bus.stall or error), f"see {NATS_FOLDER}/{SERVER_LOG} in the run's folder"
        if pid is not None and state in STOPPED_STATES:
            why, mend = describe_stop(pid, state)
        elif self._config.nats is not None:
            mend = "see whether that server runs and can be reached"
        if bus.refusal:
            why, mend = bus.refusal, "let the server know these credentials again; the run then goes on by itself"
        return Notice(
            key="away",
            source="nats-server",
            what="nats-server refuses the run's credentials" if bus.refusal else "nats-server does not answer",
            since_ns=answered_ns,
            why=why,
            mend=mend,
            held_up=["every service"],
            stops=True,
        )

    async def _check_run(self) -> None:
        now = Moment(time.monotonic(), time.time_ns())
        processes = list(self._processes())
        self._board.see_processes(processes)
        self._board.report("memory", list(_memory_notices(processes, free_on_machine(), now.ns)))
        shortage = SHORTAGES.longest_wait_text
        self._board.report("shortage", [] if shortage is None else [_shortage_notice(shortage, now.ns)])
        self._board.report("limits", [_limit_notice(one, now.ns) for one in reached_limits()])
        notices = [shown_notice(one) for one in self._board.notices(now)]
        begun, ended = self._changes.update(notices, now.s)
        self._history.record(self._changes.open, ended, now.ns)
        for one in [one for one in begun if one.key != ENDED]:  # the supervisor logs each end
            log.warning("%s", _named(one, notice_line(one)))
        for one in ended:
            lasted = "" if one.since_ns is None else f", after {(now.ns - one.since_ns) / 1e9:.0f} s"
            log.info("over%s: %s", lasted, _named(one, one.what))
        self._writer.write(notices, self._board.progress.outcomes)
        await self._broadcast(notices, now.ns)

    async def _broadcast(self, notices: Sequence[Notice], now_ns: int) -> None:
        bus = self._bus
        if bus is None or bus.stall is not None:
            return
        beat = Heartbeat(
            run=self._config.run,
            service=SUPERVISOR,
            instance=self._instance,
            pid=os.getpid(),
            time_ns=now_ns,
            stage=StageVitals(notices=list(notices)[: 4 * MAX_NOTICES]),
            host=socket.gethostname(),
            schema_version=codec.SCHEMA_VERSION,
        )
        with anyio.move_on_after(_LOOK_S), suppress(InfrastructureError):
            await bus.broadcast(subjects.heartbeat(beat.run, beat.service, beat.instance), encode(beat))

    def _report_last_step(self, beat: Heartbeat) -> None:
        """Log what the run still waits for after its last step."""
        steps = self._config.training.steps
        if steps is not None and beat.metrics.get("train/step", 0) >= steps and not self._last_step_logged:
            self._last_step_logged = True
            log.info("all %s steps are taken; the last policy is evaluated", steps)


def _named(notice: Notice, text: str) -> str:
    return text if text.startswith(notice.source) else f"{notice.source}: {text}"


def _limit_notice(limit: ReachedLimit, now_ns: int) -> Notice:
    what = f"{SUPERVISOR} {limit.text}"
    return Notice(key=limit.topic, source=SUPERVISOR, what=what, since_ns=now_ns, mend=limit.mend)


def _memory_notices(processes: Iterable[ProcessFact], free: int | None, now_ns: int) -> Iterator[Notice]:
    """Yield a notice if the machine has next to no memory left, with the process of the run that has the most."""
    if free is None or free >= _MIN_FREE_BYTES:
        return
    sizes = [(resident_bytes(one.pid), one.name) for one in processes if one.pid is not None]
    most, name = max(sizes, default=(0, ""))
    yield Notice(
        key="memory",
        source=SUPERVISOR,
        what=f"the machine has {human_bytes(free)} of memory left",
        since_ns=now_ns,
        why=f"{name} has {human_bytes(most)}, the most of this run's processes" if most else "",
        mend="`lachesis plan` says what an optimizer step takes and what makes that less; or end what else runs here",
    )


def _shortage_notice(text: str, now_ns: int) -> Notice:
    return Notice(
        key="shortage", source=SUPERVISOR, what=text, since_ns=now_ns, mend="make room there, and it goes on by itself"
    )
