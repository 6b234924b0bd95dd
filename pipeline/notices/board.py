"""Derives the current notices of a run from all that is known of it. Pure: no bus, no clock, no files.

It reads heartbeats, the supervisor's view of processes, and notices found elsewhere (a full disk, a stream at its
bound). It returns one notice for each thing that blocks or harms the run, the worst first, for as long as it holds.
Guarantees that notices of one service hide none of the others, that no process counts as silent for a time in which
the caller itself was held up, and that a process of another machine is not taken for the one here that has its pid.
"""

import math
import socket
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from lachesis.pipeline.notices.facts import (
    ExpectedRun,
    HeardProcess,
    Moment,
    ProcessFact,
    held_up_by,
    may_stop_training,
    without_figures,
)
from lachesis.pipeline.notices.progress import StepProgress
from lachesis.pipeline.notices.silence import SILENT_S, end_notices, is_silent, never_heard_notices, silence_notices
from lachesis.pipeline.telemetry.heartbeat_log import SUPERVISOR, HeartbeatLog
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.notices import MAX_NOTICES, Notice

__all__ = ["NoticeBoard"]

_LONG_WAIT_S = 7.0
"""Seconds of waiting after which a person has to know: shorter waits are part of a healthy run."""
_WAIT_CURE = "mend that; it tries again, and goes on by itself"
_TICK_S = 3.0
"""Seconds between two looks; if they are further apart, the caller was held up and heard nothing meanwhile."""
_RECOVERY_S = 5.0
"""Seconds after the server is back in which services that waited for it may still say so."""
_FORGET_S = 600.0
"""Seconds after which a silent process is forgotten if other processes of its service send heartbeats."""
_LIVES_S = 300.0
_MAX_PROCESSES = 1024
_MAX_RUN_NOTICES = 256
"""Maximum number of notices of a run: heartbeats may come from any process in it."""
_MANY_LIVES = 4
"""From this many lives of one replica within `_LIVES_S`, they are no accident."""
_SERVER = "server"
_DISK = "disk"
"""Key of reports about the disk under the run's own server."""
_STALLED = "stalled for "
"""Begins the note of a service that waits for the server."""


class NoticeBoard:
    """All that is known of one run. `grace_s`: how long a service may send nothing after the first look.

    `host`: the name of the machine of the pids that `see_processes` and `see_states` record. Default: this one.
    """

    def __init__(self, expected: ExpectedRun, *, grace_s: float = SILENT_S, host: str | None = None) -> None:
        self._host = socket.gethostname() if host is None else host
        self.progress = StepProgress(expected.trains, expected.steps)
        self._expected = expected
        self._grace_s = grace_s
        self._began_s: float | None = None
        self._looked_s: float | None = None
        self._heard: dict[tuple[str, str], HeardProcess] = {}
        self._lives: dict[tuple[str, str], deque[float]] = {}
        self._names = HeartbeatLog()
        self._facts: list[ProcessFact] | None = None
        self._states: Mapping[int, str] = {}
        self._held: Mapping[int, str] = {}
        self._supervised: set[int] = set()
        """Pids of processes that the supervisor has started; other processes of the run may have been started by
        hand."""
        self._found: dict[str, list[Notice]] = {}
        self._server_away_s = -math.inf
        self._store_full_s = -math.inf

    # facts

    def hear(self, beat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat that came at `now_s`."""
        if beat.service == SUPERVISOR:
            return
        self._began_s = now_s if self._began_s is None else self._began_s
        one = self._heard.get((beat.service, beat.instance))
        if one is None:
            if len(self._heard) >= _MAX_PROCESSES:
                del self._heard[min(self._heard, key=lambda key: self._heard[key].heard_s)]
            if len(self._lives) >= _MAX_PROCESSES:
                del self._lives[next(iter(self._lives))]
            one = self._heard[beat.service, beat.instance] = HeardProcess(now_s, now_s, beat)
            self._lives.setdefault((beat.service, beat.replica), deque(maxlen=_MANY_LIVES)).append(now_s)
        one.hear(beat, now_s)
        self._names.add(beat, now_s)
        self.progress.hear(beat, now_s)

    def see_processes(self, facts: Iterable[ProcessFact]) -> None:
        """Record the state of the planned processes, which only their supervisor knows."""
        self._facts = list(facts)
        self._states = {fact.pid: fact.state for fact in self._facts if fact.pid is not None}
        self._held = {fact.pid: fact.held for fact in self._facts if fact.pid is not None and fact.held}
        self._supervised |= self._states.keys()

    def see_states(self, states: Mapping[int, str]) -> None:
        """Record the kernel's states of processes of this machine, by pid: letters of proc(5), "" for none."""
        self._states = states

    def report(self, about: str, notices: Iterable[Notice]) -> None:
        """Record notices found elsewhere `about` something; they replace the earlier ones about it."""
        known = {(one.source, one.key): one.since_ns for one in self._found.get(about, ())}
        self._found[about] = [
            msgspec.structs.replace(one, since_ns=known.get((one.source, one.key)) or one.since_ns) for one in notices
        ]

    def report_server(self, notice: Notice | None) -> None:
        """Record why the server cannot be reached; None: it can. Without it no heartbeat arrives."""
        self.report(_SERVER, [] if notice is None else [notice])

    def silent_for_s(self, pid: int, now_s: float) -> float | None:
        """Return for how long a process has sent no heartbeat; None: it never sent one.

        Times at which no heartbeat could arrive do not count.
        """
        heard = [one.heard_s for one in self._heard.values() if one.beat.pid == pid]
        if not heard:
            return None
        return 0.0 if self._found.get(_SERVER) else max(0.0, now_s - max(*heard, self._server_away_s))

    # notices

    def notices(self, now: Moment) -> list[Notice]:
        """Return the notices that hold now: those that stop the run first, then by when they began."""
        self._pass_over_blindness(now.s)
        self._forget(now.s)
        speaking, silent = self._by_speech(now.s)
        found = [*self._reported(), *self._problems(speaking)]
        if self._found.get(_SERVER):
            self._server_away_s = now.s
        elif now.s - self._server_away_s > _RECOVERY_S:
            found += self._waits(speaking, now)
        if self._facts is not None:
            heard = {one.beat.pid: one for one in self._heard.values()}
            found += end_notices(self._facts, heard, now)
        if not self._found.get(_SERVER):
            found += self._silences(speaking, silent, now)
        found += self._shared_names()
        found += self._many_lives(now)
        found += self.progress.notices(now, speaking, [one for one in found if may_stop_training(one)])
        return sorted(_bounded(found), key=lambda one: (not one.stops, one.since_ns or 0))[:_MAX_RUN_NOTICES]

    def _pass_over_blindness(self, now_s: float) -> None:
        if self._began_s is None:
            self._began_s = now_s
        if self._looked_s is not None and now_s - self._looked_s > _TICK_S:
            blind_s = now_s - self._looked_s
            for one in self._heard.values():
                one.heard_s = min(now_s, one.heard_s + blind_s)
                one.waits_seen_s += blind_s
            self._began_s += blind_s
            self.progress.pass_over(blind_s)
        self._looked_s = now_s

    def _forget(self, now_s: float) -> None:
        """Forget processes that drained, that ended as their supervisor saw, or that others replaced."""
        ended = self._supervised - self._states.keys()
        for key, one in list(self._heard.items()):
            if now_s - one.heard_s <= 1.0:
                continue
            drained = one.beat.stage.state == "draining" and now_s - one.heard_s > SILENT_S
            if drained or self._local_pid(one) in ended or self._was_replaced(one, now_s):
                del self._heard[key]

    def _was_replaced(self, one: HeardProcess, now_s: float) -> bool:
        for other in self._heard.values():
            if other.beat.service == one.beat.service and other is not one:
                same = other.beat.replica == one.beat.replica
                if other.first_s >= one.heard_s and same:
                    return True
                if now_s - one.heard_s > _FORGET_S and other.heard_s > one.heard_s:
                    return True
        return False

    def _by_speech(self, now_s: float) -> tuple[list[HeardProcess], list[HeardProcess]]:
        speaking: list[HeardProcess] = []
        silent: list[HeardProcess] = []
        for one in self._heard.values():
            pid = self._local_pid(one)
            is_away = is_silent(one, now_s, self._states.get(pid, ""), self._held.get(pid, ""))
            (silent if is_away else speaking).append(one)
        return speaking, silent

    def _local_pid(self, one: HeardProcess) -> int:
        """Return the pid of a process of this machine; -1, which is none, for one of another."""
        return one.beat.pid if one.beat.host == self._host else -1

    def _reported(self) -> Iterator[Notice]:
        for notices in self._found.values():
            yield from notices

    def _problems(self, speaking: Sequence[HeardProcess]) -> Iterator[Notice]:
        """Yield the problems that services report; if processes of a service report the same, that is one notice."""
        found: dict[tuple[str, str], Notice] = {}
        for one in speaking:
            for notice in one.beat.stage.notices[:MAX_NOTICES]:
                known = found.get((one.beat.service, notice.key))
                mine = msgspec.structs.replace(notice, source=one.beat.service)
                found[one.beat.service, notice.key] = mine if known is None else _together(known, mine)
        yield from found.values()

    def _waits(self, speaking: Sequence[HeardProcess], now: Moment) -> Iterator[Notice]:
        """Yield a notice for each thing that is waited for, however many processes wait for it."""
        found: dict[tuple[str, str], Notice] = {}
        if any(one.stops for one in self._found.get(_DISK, ())):
            self._store_full_s = now.s
        is_store_full = now.s - self._store_full_s <= _RECOVERY_S
        for one in speaking:
            if one.waits_since_s is None or now.s - one.waits_since_s < _LONG_WAIT_S:
                continue
            note = one.wait_note or "it does not say for what"
            if any(said.stops and said.what == note for said in one.beat.stage.notices):
                continue  # it reports that itself
            if is_store_full and note.startswith(_STALLED):
                continue  # there is a notice of the full disk under the server already
            service, key = one.beat.service, f"waits/{without_figures(note)}"
            mine = Notice(
                key=key,
                source=service,
                what=f"{service} is waiting",
                since_ns=now.ago_ns(one.waits_since_s),
                why=note,
                mend=_WAIT_CURE,
                held_up=held_up_by(service),
                stops=True,
            )
            known = found.get((service, key))
            found[service, key] = mine if known is None else _together(known, mine)
        yield from found.values()

    def _silences(
        self, speaking: Sequence[HeardProcess], silent: Sequence[HeardProcess], now: Moment
    ) -> Iterator[Notice]:
        if self.progress.is_finished:
            return  # the run is about to end
        facts = {fact.pid: fact for fact in self._facts or () if fact.pid is not None}
        services = {one.beat.service for one in speaking}
        here = [one for one in silent if one.beat.host == self._host]
        elsewhere = [one for one in silent if one.beat.host != self._host]
        yield from silence_notices(here, services, self._states, facts, now)
        yield from silence_notices(elsewhere, services, {}, {}, now)
        waited_s = now.s - (self._began_s or now.s)
        if self._facts is None and waited_s >= self._grace_s:
            known = {one.beat.service for one in self._heard.values()} | {service for service, _ in self._lives}
            missing = sorted(set(self._expected.services) - known)
            yield from never_heard_notices(missing, len(self._expected.services))

    def _shared_names(self) -> Iterator[Notice]:
        for shared in self._names.shared_names():
            yield Notice(key=f"name/{shared.name}", source=shared.service, what=shared.text, mend=shared.mend)

    def _many_lives(self, now: Moment) -> Iterator[Notice]:
        """Yield a notice for each replica that was started again and again, if no supervisor reports its ends."""
        if self._facts is not None:
            return
        for (service, replica), times in self._lives.items():
            if replica and len(times) == _MANY_LIVES and now.s - times[0] <= _LIVES_S:
                yield Notice(
                    key=f"lives/{replica}",
                    source=service,
                    what=f"{service} was started {_MANY_LIVES} times in {now.s - times[0]:.0f} s",
                    since_ns=now.ago_ns(times[0]),
                    mend="see the end of its log for why it ends",
                    held_up=held_up_by(service),
                )


def _together(one: Notice, other: Notice) -> Notice:
    """Return one notice for two processes of a service that report the same."""
    since = [at for at in (one.since_ns, other.since_ns) if at is not None]
    return msgspec.structs.replace(
        one,
        since_ns=min(since, default=None),
        processes=one.processes + other.processes,
        stops=one.stops and other.stops,
    )


def _bounded(found: Iterable[Notice]) -> Iterator[Notice]:
    """Yield notices, up to a maximum number for each source."""
    count: Counter[str] = Counter()
    for one in found:
        count[one.source] += 1
        if count[one.source] <= MAX_NOTICES:
            yield one
