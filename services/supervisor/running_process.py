"""One process of the run, as the supervisor knows it: this life, those before, and its services."""

import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from lachesis.pipeline.common.process_state import process_state
from lachesis.pipeline.notices.facts import ProcessFact
from lachesis.pipeline.notices.silence import ends_recur
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.services.planned_processes import PlannedProcess
from lachesis.services.supervisor.child import ServiceProcess
from lachesis.services.supervisor.forking import SpawnedProcess

__all__ = ["RunningProcess", "send", "state_of"]

_COUNTED_S = 1800.0
_MIN_SHOWN_S = 3.0
"""The least time for which the end of a process is shown, however soon it works again."""
_COUNTED_ENDS = 1000
_SPOKE_S = 1.5
"""A process that sent a heartbeat so recently, a little more than the time between two, runs."""


@dataclass(slots=True)
class RunningProcess:
    """What the supervisor knows of one planned process. `ready` is set once it ever was, `up` while it is.

    `lives` is where it is started again and again: cancelled, one that has not begun never does.
    """

    planned: PlannedProcess
    process: SpawnedProcess | ServiceProcess | None = None
    ready: anyio.Event = field(default_factory=anyio.Event)
    up: bool = False
    stages: dict[str, StageVitals] = field(default_factory=dict)
    """What its services say of themselves in this life, by the names under which they speak."""
    failing: str = ""
    """Why its last life ended; empty once it works again."""
    hung: str = ""
    """Why the supervisor has ended this life of it; empty: it has not."""
    held: str = ""
    """The line of code that holds its interpreter; empty: none is known to."""
    started_s: float = 0.0
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=_COUNTED_ENDS))
    """When its newest lives ended."""
    last_end: str = ""
    restarts: int = -1
    log_start: int = 0
    stopping: bool = False
    lives: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def worked(self) -> bool:
        """Whether it has stored results in this life."""
        return any(stage.emitted > 0 for stage in self.stages.values())

    @property
    def starts_with(self) -> StageVitals | None:
        """The vitals of its first service that has not started; None: it has not reached the server."""
        return next((stage for stage in self.stages.values() if stage.state == "starting"), None)

    def hear(self, beat: Heartbeat) -> None:
        """Take in a heartbeat of one of its services. It is up once all of them have started."""
        self.stages[beat.service] = beat.stage
        if self.failing and _works(beat):
            self.failing = ""
        said = [self.stages.get(name) for name in self.planned.speakers]
        self.up = self.up or all(stage is not None and stage.state != "starting" for stage in said)

    def stop(self, number: signal.Signals) -> None:
        """End its process by a signal, the last one."""
        self.stopping = True
        self.lives.cancel()
        send(self.process, number)

    def fact(self, silent_for_s: Callable[..., float], log: Path) -> ProcessFact:
        """Return how it stands. `silent_for_s` says for how long a process has sent no heartbeat."""
        now_s = time.monotonic()
        process = self.process
        pid = None if process is None or process.returncode is not None else process.pid
        ends = [at for at in self.ends_s if now_s - at <= _COUNTED_S]
        silent_s = 0.0 if pid is None else silent_for_s(pid, since_s=self.started_s)
        return ProcessFact(
            name=self.planned.name,
            services=self.planned.speakers,
            pid=pid,
            started_s=self.started_s,
            state="" if pid is None else state_of(pid, silent_s),
            failing=self.failing or (self.last_end if ends and now_s - ends[-1] < _MIN_SHOWN_S else ""),
            failing_since_s=ends[0] if ends else None,
            ends=len(ends),
            ends_within_s=_COUNTED_S,
            recurs=ends_recur(ends, now_s),
            last_end=self.last_end,
            done=self.ended.is_set() or self.stopping,
            log=str(log),
            held=self.held,
        )


def _works(beat: Heartbeat) -> bool:
    """Return whether a process that was started again works: it has results, or is ready if it makes none."""
    return beat.stage.emitted > 0 or (beat.stage.slots is None and beat.stage.state == "ok")


def state_of(pid: int, silent_s: float) -> str:
    """Return the kernel's state of a process, which is known as long as it sends heartbeats: then it runs."""
    return process_state(pid) if silent_s > _SPOKE_S else "R"


def send(process: SpawnedProcess | ServiceProcess | None, number: signal.Signals) -> None:
    """Send a signal to a process, if it still runs."""
    if process is not None and process.returncode is None:
        process.send_signal(number)
