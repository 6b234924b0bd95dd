"""Collects the newest metrics of the other services from their heartbeats, for the trainer's log.

People read them beside the loss. Nothing depends on them, so a lost one is not requested again; the data they are
derived from is in the streams.
"""

import logging
from collections.abc import Iterator
from contextlib import aclosing
from itertools import islice

import anyio

from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog, ReportedNames
from lachesis.schemas.control import Heartbeat

__all__ = ["PeerMetrics"]

log = logging.getLogger("lachesis")

_PREFIXES = {
    "batcher": ("batching/tokens_per_sequence/",),
    "curriculum": ("curriculum/",),
    "evaluator": ("eval/",),
    "health": ("health/",),
    "normalizer": ("reliability/", "reward_norm/", "reward_shaping/"),
    "scorer": ("reward/",),
}
"""The metrics taken from each service; no other service can send them in its place."""
_MAX_FIGURES = 2000
"""Figures that are taken from one process."""
_MAX_NAME_CHARS = 200


class PeerMetrics:
    """Keeps the newest heartbeat of each instance of the other services, and logs once where two share a name."""

    def __init__(self) -> None:
        self._log = HeartbeatLog()
        self._now_s = 0.0
        self._reported = ReportedNames()

    async def listen(self, service: Service) -> None:
        """Take in heartbeats. Runs until cancelled."""
        async with aclosing(listen_to_heartbeats(service.bus, service.run)) as beats:
            async for beat in beats:
                if beat.service != service.name:
                    self.record_heartbeat(beat, anyio.current_time())

    def last_heard_s(self, service: str) -> float:
        """Return when a service was heard last, by the event loop's clock; minus infinity: never."""
        return self._log.heard_s(service)

    def record_heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        """Take in a heartbeat that came at `now_s`."""
        self._now_s = now_s
        self._log.add(beat, now_s)
        for shared in self._reported.new_among(self._log.shared_names(beat.service)):
            log.warning("%s", shared)

    def figures(self) -> dict[str, float]:
        """Return the services' figures. They are `batching/tokens_per_sequence/*`, `curriculum/*`, `eval/*`,
        `health/*`, `reliability/*`, `reward/*`, `reward_norm/*` and `reward_shaping/*` as the services reported them,
        and `queue/{service}/{lag,redelivered}`: the largest lag that an instance reported, and the sum of their
        redeliveries.
        """
        found: dict[str, float] = {}
        for service in self._log.services():
            beats = [one.newest for one in self._log.processes(service, speaking_at_s=self._now_s)]
            for beat in beats:
                found |= dict(islice(_figures(beat), _MAX_FIGURES))
            lags = [beat.stage.lag for beat in beats if beat.stage.lag is not None]
            if lags:
                found[f"queue/{service}/lag"] = float(max(lags))
                found[f"queue/{service}/redelivered"] = float(sum(beat.stage.redelivered for beat in beats))
        return found


def _figures(beat: Heartbeat) -> Iterator[tuple[str, float]]:
    """Yield a heartbeat's figures; names may hold text of a rollout, such as its skill."""
    prefixes = _PREFIXES.get(beat.service, ())
    for name, value in beat.metrics.items():
        if name.startswith(prefixes) and len(name) <= _MAX_NAME_CHARS:
            yield name, value
