"""Returns the notices of a run: the supervisor's where one runs, else what can be derived here."""

import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from lachesis.pipeline.bus.disk_room import StoreFinding, assess, stored_bytes
from lachesis.pipeline.bus.store_reservation import store_budget
from lachesis.pipeline.common.disk import disk_room
from lachesis.pipeline.common.doctor_finding import DoctorFinding
from lachesis.pipeline.common.process_state import STOPPED_STATES, describe_stop, process_state
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.facts import ExpectedRun, Moment
from lachesis.pipeline.notices.progress import fruitless_warning
from lachesis.pipeline.notices.silence import SILENT_S
from lachesis.pipeline.telemetry.heartbeat_log import SUPERVISOR, HeartbeatLog
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.notices import Notice
from lachesis.services.observe.progress import recent_figures
from lachesis.services.planned_processes import planned_services
from lachesis.services.process.process_limits import FILES_CURE, has_all_files_open
from lachesis.services.run.notices_file import read_notices
from lachesis.services.run.supervisor_state import STATE_FILE, SupervisorState, read_record

__all__ = [
    "DISK",
    "NoticeWatch",
    "disk_notices",
    "exhaustion_notices",
    "expected_run",
    "outcome_notices",
    "step_durations",
    "supervisor_notices",
]

DISK = "disk"
"""Begins the keys of notices about the disk of the run's own server."""
_MIN_FREE_BYTES = 64 << 10
"""Room below which a supervisor cannot be expected to write its notices."""
_MEASURE_S = 10.0
"""Between two measurements of what the store holds, which look at each of its files."""


def expected_run(config: RunConfig, *, missed: bool = True) -> ExpectedRun:
    """Return what a run should be by its configuration.

    `missed`: whether services that were never heard are missed.
    """
    train = config.mode == "train"
    services = frozenset(planned_services(config)) if missed else frozenset()
    return ExpectedRun(services, train, config.training.steps if train else None)


def step_durations(folder: Path) -> list[float]:
    """Return how long the newest steps took, seconds, by the figures in a run's folder."""
    times = [figures["train/time"] for figures in recent_figures(folder) if "train/time" in figures]
    took = [after - before for before, after in pairwise(times)]
    return [seconds for seconds in took if seconds > 0]


def disk_notices(found: StoreFinding) -> list[Notice]:
    """Return what a finding about the disk of the run's own server is to people."""
    if found.text is None:
        return []
    held_up = ["every service"] if found.stops else []
    return [
        Notice(
            key=f"{DISK}/{found.level}",
            source="nats-server",
            what=found.text,
            since_ns=time.time_ns(),
            held_up=held_up,
            stops=found.stops,
        )
    ]


def exhaustion_notices(found: Iterable[DoctorFinding]) -> list[Notice]:
    """Return what findings about streams and readers that are used up are to people."""
    return [
        Notice(
            key=one.check,
            source="nats-server",
            what=f"{one.check}: {one.text}",
            mend=one.mend or "",
            held_up=["environments"] if "no new leases" in one.text else [],
            stops="no new leases" in one.text,
        )
        for one in found
    ]


def outcome_notices(outcomes: Mapping[str, int]) -> list[Notice]:
    """Return what is to be said of a run that has ended, whose groups these outcomes had."""
    fruitless = fruitless_warning(outcomes)
    return (
        [] if fruitless is None else [Notice(key="fruitless", source="batcher", what=fruitless[0], mend=fruitless[1])]
    )


def supervisor_notices(folder: Path) -> list[Notice]:
    """Return why the supervisor here writes no notices: its disk is full, or it is silent."""
    state = read_record(folder / STATE_FILE, SupervisorState)
    if state is None or state.phase != "running" or not state.process.runs:
        return []
    room = disk_room(folder)
    if room.total_bytes and (room.free_bytes < _MIN_FREE_BYTES or not room.inodes):
        return [
            Notice(
                key=f"{DISK}/folder",
                source=SUPERVISOR,
                what=f"the disk that holds {folder} is full",
                why=f"{room.free_bytes:,} bytes free, so that the supervisor cannot write down what else there is",
                mend="make room there, and the run goes on by itself",
                held_up=["every service"],
                stops=True,
            )
        ]
    pid = state.process.pid
    why, mend = "it hangs, or cannot write", f"see its process {pid}, and the disk of {folder}"
    if (stopped := process_state(pid)) in STOPPED_STATES:
        why, mend = describe_stop(pid, stopped)
    elif has_all_files_open(pid):
        why, mend = f"its process {pid} can open no more files: it has as many open as it may", FILES_CURE
    return [
        Notice(
            key="silent",
            source=SUPERVISOR,
            what="supervisor is silent",
            why=why,
            mend=mend,
            held_up=["the restart of services that end"],
            stops=True,
        )
    ]


class NoticeWatch:
    """Keeps what one who looks at a run hears of it. `grace_s`: how long a service may be unheard of at first.

    `expects`: whether the services of the run should be heard; not, where it is about to end, or nothing can be heard.
    """

    def __init__(self, config: RunConfig, *, grace_s: float = SILENT_S, expects: bool = True) -> None:
        self._config = config
        self._board = NoticeBoard(expected_run(config, missed=expects), grace_s=grace_s)
        self._board.progress.seed(step_durations(config.path))
        self._disk = _DiskWarning(config)
        self._heard = HeartbeatLog()

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat that came at `now_s`."""
        self._heard.add(beat, now_s)
        self._board.hear(beat, now_s)

    def hear_all(self, heard: HeartbeatLog) -> None:
        """Take in what was heard by another log, whose times are of the same clock."""
        self._heard = heard
        for at_s, beat in heard.all_beats():
            self._board.hear(beat, at_s)

    def report_exhaustion(self, found: Iterable[DoctorFinding]) -> None:
        """Take in what of the server is used up."""
        self._board.report("exhaustion", exhaustion_notices(found))

    def report_server(self, problem: str | None) -> None:
        """Record why the server cannot be queried; None: it can."""
        notice = None
        if problem is not None:
            notice = Notice(
                key="away", source="nats-server", what="nats-server does not answer", why=problem, stops=True
            )
        self._board.report_server(notice)

    def notices(self, now_s: float) -> list[Notice]:
        """Return what holds at `now_s`: as the supervisor says, if it does."""
        said = read_notices(self._config.path)
        if said is None:
            said = self._heard.supervisor_notices(now_s)
        if said is not None:
            return said
        self._board.report("disk", disk_notices(self._disk.finding()))
        self._board.see_states(_states(self._heard.newest()))
        return [*supervisor_notices(self._config.path), *self._board.notices(Moment(now_s, time.time_ns()))]


def _states(beats: Sequence[Heartbeat]) -> dict[int, str]:
    """Return the kernel's states of the processes of this machine among those that were heard."""
    here = socket.gethostname()
    return {beat.pid: process_state(beat.pid) for beat in beats if beat.host == here}


class _DiskWarning:
    """The disk under a run's own server, looked at again and again: when it is full, the whole run stops."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stored = 0
        self._measured_s = float("-inf")

    def finding(self) -> StoreFinding:
        """Return how the disk stands now: `ok` where the server is not the run's own."""
        store = self._config.store
        if store is None or not store.is_dir():
            return StoreFinding("ok")
        if time.monotonic() - self._measured_s >= _MEASURE_S:
            self._stored, self._measured_s = stored_bytes(store), time.monotonic()
        return assess(store, disk_room(store), self._stored, store_budget(store, self._config.streams))
