"""A run in simulated time: its services' heartbeats and processes, second by second, for a board of notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lachesis.pipeline.notices.board import NoticeBoard
from lachesis.pipeline.notices.facts import ExpectedRun, Moment, ProcessFact
from lachesis.schemas.control import Heartbeat, StageVitals
from lachesis.schemas.notices import Notice

SERVICES = (
    "governor", "batcher", "normalizer", "curriculum", "health", "scorer", "teacher", "trainer", "inference-policy",
    "inference-teacher", "inference-eval", "gateway", "environment-sums", "environment-words", "evaluator",
)  # fmt: skip
EPOCH_NS = 1_800_000_000 * 10**9
STEP_S = 4.0


@dataclass
class Simulated:
    """One process: what its heartbeats say, and what its supervisor sees of it."""

    service: str
    pid: int
    speaks: bool = True
    kernel: str = "S"
    state: Any = "ok"
    note: str | None = None
    since_s: float = 0.0
    emitted: int = 0
    in_flight: int = 0
    works: bool = True
    notices: list[Notice] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    failing: str = ""
    ends: int = 0
    last_end: str = ""
    runs: bool = True
    life: int = 1
    started_s: float = 0.0
    replica: str = "1"
    supervised: bool = True
    host: str = "here"


class SimulatedRun:
    """A healthy run that takes a step every `STEP_S`. `supervised`: the board is the supervisor's."""

    def __init__(
        self, *, supervised: bool = True, services: tuple[str, ...] = SERVICES, steps: int | None = None
    ) -> None:
        self.board = NoticeBoard(ExpectedRun(frozenset(services), True, steps), host="here")
        self.processes = {name: Simulated(name, 1000 + number) for number, name in enumerate(services)}
        self.supervised = supervised
        self.s = 0.0
        self.step = 0
        self.trains = True
        self.outcomes = {"batched": 0, "zero_variance": 0}
        self.each_second: Callable[[SimulatedRun], None] | None = None

    def __getitem__(self, service: str) -> Simulated:
        return self.processes[service]

    def wait(self, service: str, note: str, state: str = "waiting") -> None:
        one = self[service]
        one.state, one.note, one.since_s = state, note, self.s

    def problem(self, service: str, key: str, what: str, **more: Any) -> None:
        since_ns = EPOCH_NS + round(self.s * 1e9)
        self[service].notices = [Notice(key=key, source=service, what=what, since_ns=since_ns, **more)]

    def run(self, seconds: float) -> list[Notice]:
        """Let time pass, and return the notices in the end."""
        found: list[Notice] = []
        for _ in range(round(seconds)):
            found = self.second()
        return found

    def second(self) -> list[Notice]:
        """Let one second pass, and return the notices after it."""
        self.s += 1.0
        if self.each_second is not None:
            self.each_second(self)
        if self.trains and self.s % STEP_S == 0:
            self.step += 1
            self.outcomes["batched"] += 2
        if "batcher" in self.processes:
            self["batcher"].metrics = {f"batching/outcomes/{kind}": float(n) for kind, n in self.outcomes.items()}
        if "trainer" in self.processes:
            self["trainer"].metrics = {"train/step": float(self.step)}
        for one in self.processes.values():
            one.emitted += one.works and one.state == "ok"
            if one.speaks and one.runs:
                self.board.hear(self._beat(one), self.s)
        if self.supervised:
            self.board.see_processes([self._fact(one) for one in self.processes.values() if one.supervised])
        return self.board.notices(self.moment)

    @property
    def moment(self) -> Moment:
        return Moment(self.s, EPOCH_NS + round(self.s * 1e9))

    def restart(self, service: str, *, speaks: bool = True) -> None:
        """Give a process a new life."""
        old = self[service]
        life = old.life + 1
        new = Simulated(service, old.pid + 100, life=life, speaks=speaks, ends=old.ends, last_end=old.last_end)
        self.processes[service] = replace(new, started_s=self.s)

    def _beat(self, one: Simulated) -> Heartbeat:
        stage = StageVitals(
            state=one.state,
            note=one.note,
            since_ns=EPOCH_NS + round(one.since_s * 1e9),
            notices=list(one.notices),
            emitted=one.emitted,
            in_flight=one.in_flight,
        )
        return Heartbeat(
            schema_version=1,
            run="r",
            service=one.service,
            instance=f"{one.pid}-{one.life}",
            pid=one.pid,
            time_ns=EPOCH_NS + round(self.s * 1e9),
            stage=stage,
            metrics=dict(one.metrics),
            replica=one.replica,
            host=one.host,
        )

    def _fact(self, one: Simulated) -> ProcessFact:
        return ProcessFact(
            name=one.service,
            services=(one.service,),
            pid=one.pid if one.runs else None,
            started_s=one.started_s,
            state=one.kernel if one.runs else "",
            failing=one.failing,
            failing_since_s=self.s if one.failing else None,
            ends=one.ends,
            ends_within_s=300.0,
            recurs=one.ends > 2,
            last_end=one.last_end,
            log=f"logs/{one.service}.log",
        )
