"""What a service says of itself: counters, gauges and histograms, read once a second by its heartbeat."""

from lachesis.pipeline.telemetry.figures import Exemplar, Exemplars
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.control import StageHealth, StageState

__all__ = ["Health"]


class Health:
    """Mutable figures of one service; `report` gives them as they travel. All counts are since the service started."""

    def __init__(self) -> None:
        self.state: StageState = "starting"
        self.note: str | None = None
        self.handled = 0
        self.emitted = 0
        self.redelivered = 0
        self.retried = 0
        self.dead = 0
        self.in_flight = 0
        self.lag: int | None = None
        self.wait = Histogram()
        self.process = Histogram()
        self.wait_exemplars = Exemplars()
        self.process_exemplars = Exemplars()
        self.metrics: dict[str, float] = {}

    def done(self, stamp: Stamp, *, traced: str | None = None) -> None:
        """Count one handled group and the times it took; `traced` is its id if its trace is exported."""
        self.handled += 1
        wait_s, process_s = (stamp.start_ns - stamp.stored_ns) / 1e9, (stamp.end_ns - stamp.start_ns) / 1e9
        self.wait.record(wait_s)
        self.process.record(process_s)
        if traced is not None:
            self.wait_exemplars.note(Exemplar(wait_s, traced, stamp.end_ns))
            self.process_exemplars.note(Exemplar(process_s, traced, stamp.end_ns))

    def report(self) -> StageHealth:
        return StageHealth(
            state=self.state,
            handled=self.handled,
            emitted=self.emitted,
            redelivered=self.redelivered,
            retried=self.retried,
            dead=self.dead,
            in_flight=self.in_flight,
            lag=self.lag,
            wait=self.wait.pack(),
            process=self.process.pack(),
            note=self.note,
        )
