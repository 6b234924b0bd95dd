"""Keeps the heartbeats of a run by service and process. Pure: no bus, no clock.

Takes heartbeats, each with the time at which the listener received it, in seconds of a clock that does not jump (the
sender's clock may be wrong). Gives the live processes, their newest heartbeats, and how their figures grew within the
window. `status`, `top`, the demo's view and the trainer's log all keep their heartbeats here.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.notices import Notice

__all__ = ["SILENCE_S", "SUPERVISOR", "HeartbeatLog", "ProcessBeats", "ReportedNames", "SharedName", "forget_before"]

T = TypeVar("T")

SILENCE_S = 5.0
"""A process that sent nothing for so long, five heartbeats, no longer speaks."""
_MAX_REPORTED_NAMES = 100
"""Shared names that are reported: heartbeats may come from anybody in the run."""
SUPERVISOR = "supervisor"
"""The service in whose heartbeats the supervisor's notices travel; it is none of the services of a run."""


@dataclass(slots=True)
class ProcessBeats:
    """The heartbeats of one process with the time each came; the oldest is from before the window if there is one."""

    beats: deque[tuple[float, Heartbeat]] = field(default_factory=deque)

    @property
    def newest(self) -> Heartbeat:
        return self.beats[-1][1]

    @property
    def oldest(self) -> Heartbeat:
        return self.beats[0][1]

    @property
    def heard_s(self) -> float:
        """When the newest came."""
        return self.beats[-1][0]

    def speaks_beside(self, other: "ProcessBeats") -> bool:
        """Return whether the two are heard in turn, and not one after the other."""
        return self is not other and self.heard_s > other.beats[0][0] and other.heard_s > self.beats[0][0]

    @property
    def span_s(self) -> float:
        """Seconds between the oldest and the newest, by the sender's clock."""
        return (self.newest.time_ns - self.oldest.time_ns) / 1e9

    def growth(self, figure: Callable[[StageVitals], float | None]) -> float | None:
        """Return by how much a figure grew each second."""
        before, after = figure(self.oldest.stage), figure(self.newest.stage)
        if before is None or after is None or self.span_s <= 0:
            return None
        return (after - before) / self.span_s


@dataclass(frozen=True, slots=True)
class SharedName:
    """A name by which several processes of a service go at the same time, and where those are."""

    service: str
    name: str
    places: tuple[str, ...]

    @property
    def text(self) -> str:
        return (
            f"{len(self.places)} processes of {self.service} call themselves replica {self.name} "
            f"({', '.join(self.places)}): traces and metrics cannot tell them apart"
        )

    @property
    def mend(self) -> str:
        return "give each a --replica number of its own, or none and their machines different host names"

    def __str__(self) -> str:
        return f"{self.text}; {self.mend}"


class ReportedNames:
    """The shared names that were reported so far, so that each is once. At most `_MAX_REPORTED_NAMES`."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def new_among(self, found: Iterable[SharedName]) -> list[SharedName]:
        """Return those that were not reported before; from now on they are."""
        new = []
        for shared in found:
            key = (shared.service, shared.name)
            if key not in self._known and len(self._known) < _MAX_REPORTED_NAMES:
                self._known.add(key)
                new.append(shared)
        return new


class HeartbeatLog:
    """Keeps the heartbeats of the last `window_s` seconds, and at least the newest one of each process.

    A process that no longer speaks is forgotten once another of its service does, unless `keeps_ended`.
    """

    def __init__(self, window_s: float = 0.0, *, keeps_ended: bool = False) -> None:
        self.window_s = window_s
        self._keeps_ended = keeps_ended
        self._by_service: dict[str, dict[str, ProcessBeats]] = {}
        self._supervisor: tuple[float, Heartbeat] | None = None

    def add(self, beat: Heartbeat, now_s: float) -> None:
        """Store a heartbeat that came at `now_s`."""
        if beat.service == SUPERVISOR:
            self._supervisor = now_s, beat
            return
        processes = self._by_service.setdefault(beat.service, {})
        one = processes.setdefault(beat.instance, ProcessBeats())
        one.beats.append((now_s, beat))
        forget_before(one.beats, now_s - self.window_s)
        if not self._keeps_ended:
            for instance in [key for key, other in processes.items() if other.heard_s <= now_s - SILENCE_S]:
                del processes[instance]

    def supervisor_notices(self, now_s: float) -> list[Notice] | None:
        """Return the notices of the run's supervisor; None where none speaks."""
        if self._supervisor is None or now_s - self._supervisor[0] > SILENCE_S:
            return None
        return self._supervisor[1].stage.notices

    def services(self) -> set[str]:
        """Return the services that ever spoke."""
        return set(self._by_service)

    def processes(self, service: str, *, speaking_at_s: float | None = None) -> list[ProcessBeats]:
        """Return the processes of a service by their first heartbeat; with a time, only those that speak then."""
        known = self._by_service.get(service, {}).values()
        return [one for one in known if speaking_at_s is None or one.heard_s > speaking_at_s - SILENCE_S]

    def all_beats(self) -> list[tuple[float, Heartbeat]]:
        """Return all heartbeats that are kept with the time at which each came, in that order."""
        beats = [beat for processes in self._by_service.values() for one in processes.values() for beat in one.beats]
        return sorted(beats, key=lambda beat: beat[0])

    def newest(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every process that is known."""
        return [one.newest for processes in self._by_service.values() for one in processes.values()]

    def shared_names(self, service: str | None = None) -> list[SharedName]:
        """Return the names that several live processes of a service share.

        A process that replaces one of its name does not count: one is silent before the other is heard. A draining
        process may still send heartbeats beside its successor.
        """
        found = []
        for one in self._by_service if service is None else [service]:
            by_name: dict[str, list[ProcessBeats]] = {}
            for process in self.processes(one):
                if process.newest.replica and process.newest.stage.state != "draining":
                    by_name.setdefault(process.newest.replica, []).append(process)
            for name, processes in by_name.items():
                beside = [each for each in processes if any(each.speaks_beside(other) for other in processes)]
                if beside:
                    places = tuple(f"pid {each.newest.pid} on {each.newest.host}" for each in beside)
                    found.append(SharedName(one, name, places))
        return found

    def has_namesakes(self) -> bool:
        """Return whether processes of one name were heard, be it at the same time or one after the other."""
        for processes in self._by_service.values():
            names = [one.newest.replica for one in processes.values() if one.newest.replica]
            if len(set(names)) < len(names):
                return True
        return False

    def heard_s(self, service: str) -> float:
        """Return when a service was heard last; minus infinity: never."""
        return max((one.heard_s for one in self.processes(service)), default=float("-inf"))


def forget_before(times: deque[tuple[float, T]], before_s: float) -> None:
    """Drop what is older than `before_s`, except the newest of it and whatever makes two."""
    while len(times) > 2 and times[1][0] < before_s:
        times.popleft()
