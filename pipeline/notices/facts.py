"""Defines the facts, other than heartbeats, from which notices about a run are derived. Pure."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lachesis.pipeline.extension import added
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.notices import Notice

__all__ = ["ExpectedRun", "HeardProcess", "Moment", "ProcessFact", "held_up_by", "may_stop_training", "without_figures"]

_WELL_S = 3.0
_VARIES = re.compile(r"\b[0-9a-f]{32}\b|\d[\d.:]*")
"""Matches ids of groups, counts and times: the texts of two processes that wait for the same thing differ in them."""
_HELD_UP = {
    "governor": ("environments",),
    "inference-policy": ("environments",),
    "environment": ("scorer", "trainer"),
    "scorer": ("normalizer", "trainer"),
    "teacher": ("batcher", "trainer"),
    "inference-teacher": ("teacher",),
    "normalizer": ("batcher", "trainer"),
    "batcher": ("trainer",),
    "trainer": ("the next policy",),
    "inference-eval": ("evaluator",),
    "evaluator": ("held-out evaluations",),
    "curriculum": ("the choice of tasks",),
    "health": ("health checks",),
}
"""Services that wait for each service."""
_ASIDE = {"evaluator", *(name for aside in ("evaluator", "curriculum", "health") for name in _HELD_UP[aside])}
"""What may wait while the training goes on."""


def held_up_by(*services: str) -> list[str]:
    """Return what else waits if these services do not work."""
    waiting = [name for service in services for name in _held_up_by(service)]
    return list(dict.fromkeys(name for name in waiting if name not in services))


def _held_up_by(service: str) -> Sequence[str]:
    name = service.partition("-")[0]
    known = _HELD_UP.get(service) or _HELD_UP.get(name)
    if known is None and (spec := added("services").get(name)) is not None:
        known = spec.held_up
    return known or ()


def may_stop_training(notice: Notice) -> bool:
    """Whether something that stops may be why no optimizer step is taken, because training waits for it."""
    return notice.stops and not (notice.held_up and _ASIDE.issuperset(notice.held_up))


def without_figures(text: str) -> str:
    """Return a text without ids, counts and times, which vary while the meaning is the same."""
    return _VARIES.sub("#", text)


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment on two clocks: seconds of a clock that does not jump, and Unix ns."""

    s: float
    ns: int

    def ago_ns(self, then_s: float) -> int:
        """Return the Unix ns of a time on the first clock."""
        return max(0, self.ns - round((self.s - then_s) * 1e9))


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """The expected form of a run. `services`: those that send heartbeats. `steps` to train; None: no end is set."""

    services: Collection[str] = ()
    trains: bool = True
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessFact:
    """One planned process as its supervisor sees it. Times are seconds of the clock of `Moment`.

    `services`: the names under which it sends heartbeats. `pid` None: it does not run. `state`: its state in the
    kernel, a letter of proc(5). `failing`: how its last life ended, until it works again. `ends`: how often it ended
    within `ends_within_s`. `recurs`: it ended so often and so recently that it will end again. `held`: the line of code
    that holds its interpreter; empty: none is known.
    """

    name: str
    services: tuple[str, ...]
    pid: int | None
    started_s: float
    state: str = ""
    failing: str = ""
    failing_since_s: float | None = None
    ends: int = 0
    ends_within_s: float = 0.0
    recurs: bool = False
    last_end: str = ""
    done: bool = False
    log: str = ""
    held: str = ""


@dataclass(slots=True)
class HeardProcess:
    """A process that sent heartbeats, and when the first and the newest arrived."""

    first_s: float
    heard_s: float
    beat: Heartbeat
    waits_since_s: float | None = None
    waits_seen_s: float = 0.0
    wait_note: str = ""
    _emitted: int = 0
    """Number of messages it had stored when it began to wait."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for something that a healthy run has.

        An environment at its limit does not: that is normal in a healthy run. A governor in that state does: nothing is
        admitted any more.
        """
        state = self.beat.stage.state
        return state == "waiting" or (state == "backpressure" and self.beat.service == "governor")

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Record its newest heartbeat, which came at `now_s`.

        A process that waits retries again and again, and looks healthy in between. So its wait is over only once it has
        stored something, or has looked healthy for a while.
        """
        self.heard_s, self.beat = now_s, beat
        if self.is_waiting:
            if self.waits_since_s is None:
                since_ns = beat.stage.since_ns
                self.waits_since_s = now_s - (0.0 if since_ns is None else max(0.0, (beat.time_ns - since_ns) / 1e9))
                self._emitted = beat.stage.emitted
            self.waits_seen_s, self.wait_note = now_s, beat.stage.note or ""
        elif now_s - self.waits_seen_s > _WELL_S or beat.stage.emitted > self._emitted:
            self.waits_since_s = None
