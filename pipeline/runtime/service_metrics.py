"""A service's metrics: counters, gauges and histograms, which its heartbeat reports each second."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lachesis.pipeline.common.cut_text import cut_middle
from lachesis.pipeline.telemetry.figures import Exemplar, Exemplars
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.control import StageState, StageVitals, StopKind
from lachesis.schemas.notices import MAX_NOTICE_CHARS, MAX_NOTICES, Notice

__all__ = ["ProblemDetails", "ServiceMetrics"]


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """What is known of a problem beside its text: see `Notice`."""

    why: str = ""
    mend: str = ""
    held_up: tuple[str, ...] = ()
    stops: bool = False
    until_s: float = math.inf
    """When it is over unless it is said again, by `time.monotonic`."""
    version: str = ""


class ServiceMetrics:
    """Mutable figures of one service; `report` gives them as they travel. All counts are since the service started."""

    def __init__(self) -> None:
        self.state: StageState = "starting"
        self.waits_for: str | None = None
        """What it waits for while it waits."""
        self.notes: dict[str, str] = {}
        """Notes by topic; the writer of a note removes it once it no longer holds."""
        self.problems: dict[str, str] = {}
        """By topic what goes wrong while the service goes on, and a person has to mend."""
        self.problem_details: dict[str, ProblemDetails] = {}
        """By topic what else is known of a problem; nothing where there is no more than its text."""
        self._problem_since_ns: dict[str, int] = {}
        self._state_since: tuple[StageState, int] = ("starting", time.time_ns())
        self.handled = 0
        self.emitted = 0
        self.redelivered = 0
        self.retried = 0
        self.given_back = 0
        self.dead = 0
        self.in_flight = 0
        self.lag: int | None = None
        self.slots: int | None = None
        """How many things it can work on at once; None for a service that has no work of its own."""
        self.wait = Histogram()
        self.process = Histogram()
        self.wait_exemplars = Exemplars()
        self.process_exemplars = Exemplars()
        self.metrics: dict[str, float] = {}
        self.slow: dict[str, float] = {}
        self.stopped: dict[str, list[StopKind]] = {}
        """The environments that a health check keeps from training, and how."""
        self._busy_s = 0.0
        self._working = 0
        self._since_s = time.perf_counter()

    @contextmanager
    def working(self, groups: int = 0) -> Iterator[None]:
        """Count the context's time as that of one busy slot, and `groups` as in flight meanwhile."""
        self._change(1, groups)
        try:
            yield
        finally:
            self._change(-1, -groups)

    def _change(self, slots: int, groups: int) -> None:
        self._busy_s = self._busy()
        self._since_s = time.perf_counter()
        self._working += slots
        self.in_flight += groups

    def _busy(self) -> float:
        return self._busy_s + self._working * (time.perf_counter() - self._since_s)

    def done(self, stamp: Stamp, groups: int = 1, *, traced: str | None = None) -> None:
        """Count groups handled together and the times they took.

        `traced` is a group's id if its trace is exported.
        """
        self.handled += groups
        wait_s, process_s = (stamp.start_ns - stamp.stored_ns) / 1e9, (stamp.end_ns - stamp.start_ns) / 1e9
        self.wait.record(wait_s)
        self.process.record(process_s)
        if traced is not None:
            self.wait_exemplars.record(Exemplar(wait_s, traced, stamp.end_ns))
            self.process_exemplars.record(Exemplar(process_s, traced, stamp.end_ns))

    @property
    def status_text(self) -> str | None:
        """Text of what the service waits for, and of its notes; None if there is nothing to say."""
        parts = [self.waits_for, *self.notes.values()]
        return "; ".join(filter(None, parts)) or None

    def notices(self, service: str) -> list[Notice]:
        """Return the problems as they travel. Since when they hold is known to a second."""
        now_ns, now_s = time.time_ns(), time.monotonic()
        for topic in [topic for topic, details in self.problem_details.items() if details.until_s <= now_s]:
            self.problems.pop(topic, None)
            del self.problem_details[topic]
        self._problem_since_ns = {topic: self._problem_since_ns.get(topic, now_ns) for topic in self.problems}
        found = []
        for topic, text in self.problems.items():
            details = self.problem_details.get(topic, ProblemDetails())
            found.append(
                Notice(
                    key=topic[:MAX_NOTICE_CHARS],
                    source=service,
                    what=cut_middle(text, MAX_NOTICE_CHARS),
                    since_ns=self._problem_since_ns[topic],
                    why=cut_middle(details.why, MAX_NOTICE_CHARS),
                    mend=details.mend[:MAX_NOTICE_CHARS],
                    held_up=list(details.held_up),
                    stops=details.stops,
                    version=details.version,
                )
            )
        return found[:MAX_NOTICES]

    def report(self, service: str = "") -> StageVitals:
        """Return the figures as they travel; `service`: its name."""
        if self._state_since[0] != self.state:
            self._state_since = (self.state, time.time_ns())
        return StageVitals(
            state=self.state,
            handled=self.handled,
            emitted=self.emitted,
            redelivered=self.redelivered,
            retried=self.retried,
            given_back=self.given_back,
            dead=self.dead,
            in_flight=self.in_flight,
            lag=self.lag,
            slots=self.slots,
            busy_s=None if self.slots is None else self._busy(),
            wait=self.wait.pack(),
            process=self.process.pack(),
            note=self.status_text,
            since_ns=self._state_since[1],
            notices=self.notices(service),
        )
