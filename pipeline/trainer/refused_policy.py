"""Publishes the newest policy again if no inference server can load it.

Then its file is damaged or missing. Without this, a run whose first policy is damaged after it was stored would wait
for ever, since no next policy comes.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.notices import REFUSED_POLICY

__all__ = ["refused_version", "republish_refused"]

log = logging.getLogger("lachesis")

_POLICY_SERVER = "inference-policy"
_PAUSE_NS = 10 * 10**9
"""Between two publications: a server that refuses weights of a sound file refuses them again."""


def refused_version(beat: Heartbeat) -> str | None:
    """Return the policy version that an inference server without any weights says it has refused. Pure."""
    for one in beat.stage.notices if beat.service == _POLICY_SERVER else ():
        if one.key == REFUSED_POLICY and one.stops and one.version:
            return one.version
    return None


async def republish_refused(service: Service, publish_again: Callable[[str], Awaitable[None]]) -> None:
    """Call `publish_again` with the version that is refused, again and again. Runs until cancelled."""
    last_ns = 0
    async with aclosing(listen_to_heartbeats(service.bus, service.run, _POLICY_SERVER)) as beats:
        async for beat in beats:
            version = refused_version(beat)
            # by the server's clock: of another server whose clock is behind, the pause is over
            if version is not None and not 0 <= beat.time_ns - last_ns < _PAUSE_NS:
                last_ns = beat.time_ns
                log.warning("publishing policy %s again: the inference server cannot load it", version)
                await publish_again(version)
