"""Rebuilds the copies of a stream in a cluster from the leader's copy.

A node keeps messages beyond its leader's end if it was started from an older store, or if the others were and it no
longer leads. The server compares sequences, not contents, and calls such a copy current. Reads that any copy answers,
and the next leader, then return other messages at the same sequences.
"""

import logging
from typing import Any, Final

import anyio
import msgspec

from lachesis.pipeline.bus.replies import RaftGroup, StreamInfo
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import ConfigError

__all__ = ["renew_copies"]

log = logging.getLogger("lachesis")

_POLL_S: Final = 0.1
_ASK_AGAIN_S: Final = 1.0
"""Seconds until a change that was refused is requested again, which logs a line each time."""
_STILL_S: Final = 10.0
"""Seconds without any change after which it is requested again: a server may wait for a consumer that cannot move."""
_TRIES: Final = 6


async def renew_copies(link: ServerLink, stream: str, copies: int) -> None:
    """Leave a stream to its leader alone, then have `copies` copies made from that one.

    Safe to repeat after it was cut off. Raises `ConfigError` where too few servers run, before anything changes, and
    `InfrastructureError` where the cluster does not get on with it.
    """
    if copies == 1:
        return
    info = await _info(link, stream)
    away = sorted(copy.name for copy in info.cluster.replicas if copy.offline) if info.cluster is not None else []
    if away:
        raise ConfigError(
            f"server {', '.join(away)} is away, and with it a copy of stream {stream} that may differ from the others: "
            "start it, or take it out of the cluster for ever (`nats server cluster peer-remove`), then repeat this"
        )
    for wanted in (1, copies):
        for attempt in range(_TRIES):
            if attempt:  # the same number once more would change nothing
                await _request_copies(link, stream, info.config, 1 + copies - wanted)
            if await _set_copies(link, stream, info.config, wanted):
                break
        else:
            await _request_copies(link, stream, info.config, copies)  # it is not left with one
            group = (await _info(link, stream)).cluster or RaftGroup()
            current = [group.leader, *(one.name for one in group.replicas if one.current)]
            raise InfrastructureError(
                f"the cluster does not make {wanted} copies of stream {stream}: it has those on {', '.join(current)}. "
                "Look at the servers' logs, and repeat this"
            )


async def _set_copies(link: ServerLink, stream: str, config: dict[str, Any], copies: int) -> bool:
    """Return whether the stream got so many copies, all of them current; not, if nothing moves for a while."""
    asked = await _request_copies(link, stream, config, copies)
    still, known = anyio.current_time(), RaftGroup()
    while True:
        group = (await _info(link, stream)).cluster or RaftGroup()
        if asked and _is_settled(group, copies):
            return True
        if _without_times(group) != known:
            still, known = anyio.current_time(), _without_times(group)
        elif anyio.current_time() > still + _STILL_S:
            return False
        await anyio.sleep(_POLL_S if asked else _ASK_AGAIN_S)  # the cluster does not announce a finished copy
        asked = asked or await _request_copies(link, stream, config, copies)


async def _request_copies(link: ServerLink, stream: str, config: dict[str, Any], copies: int) -> bool:
    """Return whether the server means to make so many copies."""
    change = msgspec.json.encode({**config, "num_replicas": copies})
    try:
        await link.call_api(StreamInfo, f"$JS.API.STREAM.UPDATE.{stream}", change, what=f"stream {stream}")
    except (ConfigError, InfrastructureError) as error:
        link.check()
        log.warning("stream %s: %s", stream, error)  # servers that just lost their copy are not ready for another
        return False
    return True


def _without_times(group: RaftGroup) -> RaftGroup:
    copies = [msgspec.structs.replace(one, active=0) for one in group.replicas]
    return msgspec.structs.replace(group, replicas=sorted(copies, key=lambda one: one.name))


def _is_settled(group: RaftGroup, copies: int) -> bool:
    return (
        bool(group.leader)
        and group.desired is None
        and len(group.replicas) == copies - 1
        and all(one.current and not one.offline for one in group.replicas)
    )


async def _info(link: ServerLink, stream: str) -> StreamInfo:
    return await link.call_api(StreamInfo, f"$JS.API.STREAM.INFO.{stream}", b"", what=f"stream {stream}")
