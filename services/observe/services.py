"""Summarizes services by their heartbeats since they started; merges replicas. Pure: no bus, no clock.

Makes from heartbeats, and the services that the run should have, one row a service, in the order of the pipeline, in
which None means "not known".
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Self

import msgspec

from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.control import Heartbeat, PackedHistogram, StageVitals
from lachesis.services.registry import services

__all__ = ["Quantiles", "ServiceStatus", "merge", "merged", "place", "total"]

_WORST_FIRST = ("waiting", "backpressure", "draining", "starting", "ok")
_FLOW = ("environment", "scorer", "teacher", "normalizer", "batcher", "trainer")
"""The services that a rollout goes through, in that order; the others come after them."""


class Quantiles(msgspec.Struct, frozen=True):
    """Of a time, seconds; None: nothing was counted."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, histogram: Histogram) -> Self:
        return cls(histogram.quantile(0.5), histogram.quantile(0.95), histogram.quantile(0.99))


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One service, its replicas taken together: counts added up, `lag` the largest reported, `state` the worst.

    `state` is `silent` when the run should have the service and no heartbeat came, `ended` when the run has ended; then
    nothing else is known.
    """

    service: str
    state: str
    instances: list[str] = []
    pids: list[int] = []
    handled: int | None = None
    emitted: int | None = None
    redelivered: int | None = None
    retried: int | None = None
    dead: int | None = None
    in_flight: int | None = None
    lag: int | None = None
    wait: Quantiles = Quantiles()
    process: Quantiles = Quantiles()
    notes: list[str] = []
    metrics: dict[str, float] = {}


def merge(beats: Iterable[Heartbeat], planned: Collection[str], *, absent: str = "silent") -> list[ServiceStatus]:
    """Return one row for each service that reported or should have.

    `absent`: services that should have reported.
    """
    by_service: defaultdict[str, list[Heartbeat]] = defaultdict(list)
    for beat in beats:
        by_service[beat.service].append(beat)
    rows = [merged(name, replicas) for name, replicas in by_service.items()]
    rows += [ServiceStatus(service=name, state=absent) for name in set(planned) - by_service.keys()]
    return sorted(rows, key=lambda row: place(row.service))


def merged(name: str, beats: Sequence[Heartbeat]) -> ServiceStatus:
    """Return one service's row; `beats` has the newest heartbeat of each instance, at least one."""
    beats = sorted(beats, key=lambda beat: beat.instance)
    stages = [beat.stage for beat in beats]
    return ServiceStatus(
        service=name,
        state=min((stage.state for stage in stages), key=_WORST_FIRST.index),
        instances=[beat.instance for beat in beats],
        pids=sorted({beat.pid for beat in beats}),
        handled=_count_if_known(stages, sum(stage.handled for stage in stages)),
        emitted=_count_if_known(stages, sum(stage.emitted for stage in stages)),
        redelivered=sum(stage.redelivered for stage in stages),
        retried=sum(stage.retried for stage in stages),
        dead=sum(stage.dead for stage in stages),
        in_flight=sum(stage.in_flight for stage in stages),
        lag=max((stage.lag for stage in stages if stage.lag is not None), default=None),
        wait=Quantiles.of(total(stage.wait for stage in stages)),
        process=Quantiles.of(total(stage.process for stage in stages)),
        notes=sorted({stage.note for stage in stages if stage.note}),
        metrics={key: value for beat in beats for key, value in beat.metrics.items()},
    )


def _count_if_known(stages: Sequence[StageVitals], count: int) -> int | None:
    """Return a count of groups, None where there is none and the service has no slots to work on groups either."""
    return count if count or any(stage.slots is not None for stage in stages) else None


def total(packed: Iterable[PackedHistogram | None]) -> Histogram:
    """Return the histogram of all of them together."""
    found = Histogram()
    for histogram in packed:
        if histogram is not None:
            found.merge(Histogram.unpack(histogram))
    return found


def place(service: str) -> tuple[int, int, str]:
    """Return the sort key of a service: the way of a rollout first, then what serves it."""
    name = service.partition("-")[0]
    flow = _FLOW.index(name) if name in _FLOW else len(_FLOW)
    others = list(services())
    return flow, others.index(name) if name in others else len(others), service
