"""Computes one row a stage for the last seconds, from heartbeats and consumer info. Pure: no bus.

Takes heartbeats, whose figures count from the start of each instance, and the server's information on durable
consumers. Gives rates, lag and its trend, load, and quantiles of what happened within the window, which are differences
of two heartbeats of one instance. Times are arguments, seconds of a clock that does not jump.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from lachesis.pipeline.bus.api import ConsumerLag
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog, ProcessBeats, forget_before
from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.control import Heartbeat, PackedHistogram, StageVitals
from lachesis.services.observe.services import Quantiles, merged, place

__all__ = ["Recent", "StageRow"]


class StageRow(msgspec.Struct, frozen=True, kw_only=True):
    """One service over the window, its replicas taken together. Times are seconds; None: not known.

    state: ok, starting, waiting (a dependency is down), backpressure (no lease, or a stream is full), draining, stale
    (its heartbeats stopped) or silent (none came). instances: replicas that speak. load: share of the time its slots
    were at work, 0 to 1. lag: messages that wait for it or are held by it (trainer: batches), lag_per_s its growth.
    in_flight: groups it holds; unacked: deliveries not acknowledged. in_per_s, out_per_s: groups taken up and done
    with, None for what handles no groups. wait: stored to taken up; process: taken up to done.
    redelivered, retried, dead: since its instances started. held: groups that wait for it or are in it, averaged over
    the window.
    """

    service: str
    state: str
    instances: int = 0
    load: float | None = None
    lag: int | None = None
    lag_per_s: float | None = None
    in_flight: int | None = None
    unacked: int | None = None
    in_per_s: float | None = None
    out_per_s: float | None = None
    wait: Quantiles = Quantiles()
    process: Quantiles = Quantiles()
    redelivered: int | None = None
    retried: int | None = None
    dead: int | None = None
    held: float | None = None
    notes: list[str] = []


class Recent:
    """Keeps what came in the last `window_s` seconds. `planned`: services that the run should have."""

    def __init__(self, window_s: float, planned: Collection[str] = ()) -> None:
        self.window_s = window_s
        self._planned = set(planned)
        self._heartbeats = HeartbeatLog(window_s)
        self._lags: dict[str, deque[tuple[float, ConsumerLag]]] = defaultdict(deque)

    def heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat that came at `now_s`."""
        self._heartbeats.add(beat, now_s)

    def consumer(self, service: str, lag: ConsumerLag, now_s: float) -> None:
        """Take in what the server said at `now_s` of the durable consumer of `service`."""
        self._lags[service].append((now_s, lag))
        forget_before(self._lags[service], now_s - self.window_s)

    def figures(self, service: str) -> list[tuple[float, Heartbeat]]:
        """Return the recent heartbeats of a service's instance with their times, oldest first.

        It is the instance that reported last.
        """
        processes = self._heartbeats.processes(service)
        return list(max(processes, key=lambda one: one.heard_s).beats) if processes else []

    def newest(self) -> list[Heartbeat]:
        """Return the newest heartbeat of every instance that is known."""
        return self._heartbeats.newest()

    def rows(self, now_s: float) -> list[StageRow]:
        """Return the services as of `now_s`, in the order in which a rollout meets them."""
        names = sorted(self._planned | self._heartbeats.services() | self._lags.keys(), key=place)
        return [self._row(name, now_s) for name in names]

    def _row(self, name: str, now_s: float) -> StageRow:
        speaking = self._heartbeats.processes(name, speaking_at_s=now_s)
        beats = speaking or self._heartbeats.processes(name)  # those that went before one that speaks were replaced
        asked = [lag for _, lag in self._lags.get(name, ())]
        lag = asked[-1] if asked else None
        waiting = lag.pending + lag.unacked if lag else None
        if not beats:
            return StageRow(service=name, state="silent", lag=waiting, unacked=lag.unacked if lag else None)
        status = merged(name, [one.newest for one in beats])
        works = speaking and any(one.newest.stage.slots is not None for one in beats)
        lags = [(at, float(found.pending + found.unacked)) for at, found in self._lags.get(name, ())] or [
            (at, float(beat.stage.lag)) for at, beat in beats[0].beats if beat.stage.lag is not None
        ]
        return StageRow(
            service=name,
            state=status.state if speaking else "stale",
            instances=len(speaking),
            load=_load(beats) if speaking else None,
            lag=status.lag if waiting is None else waiting,
            lag_per_s=_slope(lags),
            in_flight=status.in_flight if speaking else None,
            unacked=lag.unacked if lag else None,
            in_per_s=_sum(one.growth(lambda stage: stage.handled) for one in beats) if works else None,
            out_per_s=_sum(one.growth(lambda stage: stage.emitted) for one in beats) if works else None,
            wait=_quantiles(beats, lambda stage: stage.wait),
            process=_quantiles(beats, lambda stage: stage.process),
            redelivered=status.redelivered,
            retried=status.retried,
            dead=status.dead,
            held=_held(beats, lags if waiting is not None else []),
            notes=status.notes,
        )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _load(beats: Sequence[ProcessBeats]) -> float | None:
    """Busy slots over all slots."""
    busy = _sum(one.growth(lambda stage: stage.busy_s) for one in beats)
    slots = sum(one.newest.stage.slots or 0 for one in beats)
    return min(1.0, busy / slots) if busy is not None and slots else None


def _held(beats: Sequence[ProcessBeats], lags: Sequence[tuple[float, float]]) -> float | None:
    """Groups at the stage: what its consumer counts where it has one, else what is in flight; as averages."""
    if lags:
        return sum(value for _, value in lags) / len(lags)
    return sum(sum(beat.stage.in_flight for _, beat in one.beats) / len(one.beats) for one in beats)


def _slope(values: Sequence[tuple[float, float]]) -> float | None:
    """Return the growth per second of a least-squares line through (time, value)."""
    n = len(values)
    if n < 2:
        return None
    mean_t, mean_v = sum(t for t, _ in values) / n, sum(v for _, v in values) / n
    spread = sum((t - mean_t) ** 2 for t, _ in values)
    return sum((t - mean_t) * (v - mean_v) for t, v in values) / spread if spread else None


def _quantiles(beats: Sequence[ProcessBeats], pick: Callable[[StageVitals], PackedHistogram | None]) -> Quantiles:
    """Return the quantiles of what was counted between the oldest and the newest heartbeat of each instance."""
    found = Histogram()
    for one in beats:
        after, before = pick(one.newest.stage), pick(one.oldest.stage)
        if after is not None and before is not None and one.oldest is not one.newest:
            found.merge(Histogram.unpack(after).since(Histogram.unpack(before)))
    return Quantiles.of(found)
