"""What the trainer's log of figures takes from the health service: its newest `health/*` figures, by its heartbeats.

For people to look at beside the loss. Nothing depends on them, so one that is missed is missed; alerts themselves are
in the log (`lachesis health`).
"""

from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

__all__ = ["HealthFigures"]


class HealthFigures:
    """`newest`: figures by name, empty until the health service was heard."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}

    async def listen(self, service: Service) -> None:
        """Take in heartbeats. Runs until cancelled."""
        async with service.bus.listen(subjects.heartbeat(service.run, "health")) as beats:
            async for message in beats:
                try:
                    metrics = decode(Heartbeat, message.data).metrics
                except SchemaError:
                    continue  # it says nothing; the next one follows in a second
                self.newest = {name: value for name, value in metrics.items() if name.startswith("health/")}
