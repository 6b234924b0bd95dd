"""Runs a shadow: a revision that follows the live run in its own process, compared as both go on.

It is a replay whose selection has no end (`stage`), with a service's heartbeats around it, a reader of the live rewards
beside it, and a subscription to requests to end. Killed at any point it goes on, at its next start, behind its last
commit.
"""

import time
from collections import deque
from contextlib import suppress

import anyio
import msgspec

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.offline.compare.rolling import RollingComparison
from lachesis.pipeline.offline.replay.logic.fold import FoldCommit
from lachesis.pipeline.offline.replay.stage import ReplayProgress, ReplayRequest, run_replay
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.subjects import EVENTS, ROLLOUTS

__all__ = ["SERVICE", "run_shadow", "service_name"]

SERVICE = "shadow"
_PERIOD_S = 1.0
_RATE_S = 10.0
"""Seconds over which the rate is measured."""


def service_name(revision: str) -> str:
    """Return the name under which the shadow of a revision sends heartbeats."""
    return f"{SERVICE}-{revision}"[:64]


async def run_shadow(service: Service, config: RunConfig, request: ReplayRequest) -> ReplayProgress:
    """Follow the run until the service drains. Raises as `run_replay`."""
    shadow = _ShadowService(service, config)

    async def end(_: bytes) -> bytes:
        service.drain()
        return b""

    async with (
        service.bus.serve(subjects.shadow(config.run, request.revision), end),
        background() as tasks,
    ):
        tasks.start_soon(shadow.follow_live)
        tasks.start_soon(shadow.measure)
        return await run_replay(
            service.bus,
            config,
            request,
            draining=service.draining,
            progress=shadow.progress,
            observe=shadow.apply_commit,
        )


class _ShadowService:
    def __init__(self, service: Service, config: RunConfig) -> None:
        self._service = service
        self._config = config
        self._rolling = RollingComparison()
        self._position: int | None = None
        self._done: deque[tuple[float, int]] = deque()

    def progress(self, done: int, _: int) -> None:
        """Take in how many groups this start has committed."""
        self._service.mark_ok()
        self._service.vitals.handled = done
        self._done.append((time.monotonic(), done))

    def apply_commit(self, env: str, reached: int, folded: FoldCommit) -> None:
        """Take in a commit."""
        self._position = max(reached, self._position or 0)
        self._service.vitals.emitted += len(folded.rewards)
        self._service.vitals.dead += len(folded.unscored)
        self._rolling.shadow(env, folded.rewards)

    async def follow_live(self) -> None:
        """Read the live rewards as they come; what is no reward was dead-lettered by those it was meant for."""
        start = (await self._service.bus.usage(EVENTS)).last + 1
        rewards = subjects.event("reward", self._config.run, self._config.revision)
        async with self._service.bus.read(EVENTS, [rewards], start=start) as messages:
            async for message in messages:
                with suppress(SchemaError):
                    event = decode(RewardEvent, message.data)
                    self._rolling.live(event.env, event.groups)

    async def measure(self) -> None:
        """Keep the figures of the heartbeats up to date."""
        while True:
            await anyio.sleep(_PERIOD_S)
            with suppress(InfrastructureError):  # sent again in a moment
                last = (await self._service.bus.usage(ROLLOUTS)).last
                self._publish_figures(last)

    def _publish_figures(self, last: int) -> None:
        vitals, compared = self._service.vitals, self._rolling.figures()
        figures = {f"shadow/{name}": value for name, value in msgspec.structs.asdict(compared).items()}
        if self._position is not None:
            vitals.lag = max(0, last + 1 - self._position)
            figures |= {"shadow/position": self._position}
        figures["shadow/groups_per_s"] = self._rate()
        vitals.metrics = {name: float(value) for name, value in figures.items() if value is not None}

    def _rate(self) -> float:
        now = time.monotonic()
        while len(self._done) > 1 and self._done[1][0] <= now - _RATE_S:
            self._done.popleft()
        if not self._done:
            return 0.0
        since, before = self._done[0]
        return (self._done[-1][1] - before) / max(now - max(since, now - _RATE_S), _PERIOD_S)
