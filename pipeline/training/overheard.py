"""What the trainer's log of figures takes from the other services: their newest figures, by their heartbeats.

For people to look at beside the loss. Nothing depends on them, so one that is missed is missed; what they are derived
from is in the streams.
"""

import anyio
import msgspec

from lachesis.pipeline.stage.heartbeats import read_heartbeat
from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

__all__ = ["Overheard"]

_WANTED = (
    "batching/tokens_per_sequence/",
    "curriculum/",
    "eval/",
    "health/",
    "reliability/",
    "reward/",
    "reward_norm/",
    "reward_shaping/",
)
_SILENT_NS = 5_000_000_000
"""After so long a service that is silent is gone, and what it said of its queue with it."""


class Overheard:
    """Keeps the newest heartbeat of every instance of the run's other services."""

    def __init__(self) -> None:
        self._newest: dict[str, dict[str, Heartbeat]] = {}
        self._heard_s: dict[str, float] = {}

    async def listen(self, service: Service) -> None:
        """Take in heartbeats. Runs until cancelled."""
        async with service.bus.listen(subjects.heartbeat(service.run)) as beats:
            async for message in beats:
                try:
                    beat = read_heartbeat(message)
                except SchemaError:
                    continue  # it says nothing; the next one follows in a second
                if beat.service != service.name:  # timed by this clock: another could make all others look old
                    self._heard_s[beat.service] = anyio.current_time()
                    self.add(msgspec.structs.replace(beat, time_ns=message.time_ns))

    def heard_s(self, service: str) -> float:
        """Return when a service was heard last, by the event loop's clock; minus infinity: never."""
        return self._heard_s.get(service, float("-inf"))

    def add(self, beat: Heartbeat) -> None:
        """Take in a heartbeat."""
        self._newest.setdefault(beat.service, {})[beat.instance] = beat
        for instances in self._newest.values():
            for instance in [key for key, old in instances.items() if old.time_ns < beat.time_ns - _SILENT_NS]:
                del instances[instance]

    def figures(self) -> dict[str, float]:
        """Return `batching/tokens_per_sequence/*`, `curriculum/*`, `eval/*`, `health/*`, `reliability/*`,
        `reward/*`, `reward_norm/*` and `reward_shaping/*` as the services said them, and
        `queue/{service}/{lag,redelivered}`: the largest lag that an instance told, and their redeliveries together.
        """
        found: dict[str, float] = {}
        for service, instances in self._newest.items():
            for beat in instances.values():
                found |= {name: value for name, value in beat.metrics.items() if name.startswith(_WANTED)}
            lags = [beat.stage.lag for beat in instances.values() if beat.stage.lag is not None]
            if lags:
                found[f"queue/{service}/lag"] = float(max(lags))
                found[f"queue/{service}/redelivered"] = float(
                    sum(beat.stage.redelivered for beat in instances.values())
                )
        return found
