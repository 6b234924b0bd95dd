"""Rebuilds the copies of a stream in a cluster from the leader's copy.

A node keeps messages beyond its leader's end if it was started from an older store, or if the others were and it no
longer leads. The server compares sequences, not contents, and calls such a copy current. Reads that any copy answers,
and the next leader, then return other messages at the same sequences. So each copy can be read by itself before it is
replaced.
"""

import logging
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Final

import anyio
import msgspec

from lachesis.pipeline.bus import consumers
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.consumer_names import reader_description, reader_name, reader_names
from lachesis.pipeline.bus.consumer_pull import AckMetadata
from lachesis.pipeline.bus.pending_requests import AnswerSeries
from lachesis.pipeline.bus.permissions import identity_in
from lachesis.pipeline.bus.replies import ConsumerInfo, NameTakenError, RaftGroup, StreamInfo, plain_headers
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.bus.streams import stream_info
from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.schemas.subjects import kind_of

__all__ = ["read_copy", "renew_copies", "servers_of"]

log = logging.getLogger("lachesis")

_POLL_S: Final = 0.1
_ASK_AGAIN_S: Final = 1.0
"""Seconds until a change that was refused is requested again, which logs a line each time."""
_STILL_S: Final = 10.0
"""Seconds without any change after which it is requested again: a server may wait for a consumer that cannot move."""
_TRIES: Final = 6
_PLACEMENTS: Final = 64
"""Readers that are made until one is on the wanted server: each is put on one of three or five, at random."""
_READ_AT_ONCE: Final = 256
_READ_BYTES: Final = 8 << 20
_ANSWER_S: Final = 10.0
_NOTHING_LEFT: Final = "404"
_INACTIVE_NS: Final = 30_000_000_000


async def servers_of(link: ServerLink, stream: str) -> list[str]:
    """Return the servers that hold a stream, its leader first; none where there is no cluster.

    Raises `ConfigError` where one of them is away.
    """
    group = (await stream_info(link, stream)).cluster
    if group is None:
        return []
    _refuse_away(stream, group)
    return [group.leader, *(copy.name for copy in group.replicas)]


async def read_copy(
    link: ServerLink, stream: str, server: str, *, start: int, headers_only: bool = False, limit: int | None = None
) -> AsyncGenerator[StoredMessage]:
    """Yield the messages that one server's copy holds now, from sequence `start` on.

    Large ones come as heads and chunks.

    Raises `InfrastructureError` where that server cannot be read from.
    """
    name, left = await _reader_on(link, stream, server, start, headers_only=headers_only)
    left = left if limit is None else min(left, limit)
    request, silent_at = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}", anyio.current_time() + _ANSWER_S
    inbox, answers = link.nc.new_inbox(), AnswerSeries()

    try:
        async with link.subscribed(inbox, answers.push):
            while left:
                batch = min(left, _READ_AT_ONCE)
                body = msgspec.json.encode({"batch": batch, "no_wait": True, "max_bytes": _READ_BYTES})
                await link.send(request, body, reply=inbox)
                read, status = 0, ""
                while read < batch and (msg := await answers.next(_ANSWER_S)) is not None:
                    if status := (msg.headers or {}).get("Status", ""):
                        break
                    meta, read = AckMetadata.of(msg), read + 1
                    headers = plain_headers(msg.headers)
                    yield StoredMessage(kind_of(stream), msg.subject, meta.seq, msg.data, meta.time_ns, headers)
                left -= read
                if read:
                    silent_at = anyio.current_time() + _ANSWER_S
                elif status == _NOTHING_LEFT:
                    return  # the rest was deleted meanwhile
                elif anyio.current_time() >= silent_at:
                    raise InfrastructureError(f"server {server} does not send what it has of stream {stream}")
                else:
                    await anyio.sleep(_POLL_S)  # the other servers may not know the new reader yet
    finally:
        with anyio.move_on_after(_ANSWER_S, shield=True), suppress(LachesisError):
            await consumers.forget(link, stream, name)


async def _reader_on(link: ServerLink, stream: str, server: str, start: int, *, headers_only: bool) -> tuple[str, int]:
    """Return a consumer that reads the copy of `server`, and how many messages it has to read.

    The cluster chooses at random which server a consumer without copies of its own is on.
    """
    identity = identity_in(link.config.inbox_prefix)
    client = str(link.nc.options.get("name") or "")
    for attempt in range(_PLACEMENTS):
        suffix = secrets.token_hex(8)
        names = [reader_name(client, kind_of(stream), [], suffix)] if identity is None else reader_names(identity)
        name = names[attempt % len(names)]
        config = {
            "name": name,
            "description": reader_description(client, [], start, suffix),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "ack_policy": "none",
            "headers_only": headers_only,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": _INACTIVE_NS,
        }
        request = msgspec.json.encode({"stream_name": stream, "config": config, "action": "create"})
        with suppress(NameTakenError):
            place = f"$JS.API.CONSUMER.CREATE.{stream}.{name}"
            info = await link.call_api(ConsumerInfo, place, request, what=f"reader of {stream}")
            if info.cluster is not None and info.cluster.leader == server:
                return name, info.num_pending
            await consumers.forget(link, stream, name)
    raise InfrastructureError(
        f"no reader of stream {stream} can be had on server {server}, so what only its copy holds is not known: look "
        "at that server's log, and repeat this"
    )


async def renew_copies(link: ServerLink, stream: str, copies: int) -> None:
    """Leave a stream to its leader alone, then have `copies` copies made from that one.

    Safe to repeat after it was cut off. Raises `ConfigError` where too few servers run, before anything changes, and
    `InfrastructureError` where the cluster does not get on with it.
    """
    if copies == 1:
        return
    info = await stream_info(link, stream)
    if info.cluster is not None:
        _refuse_away(stream, info.cluster)
    for wanted in (1, copies):
        for attempt in range(_TRIES):
            if attempt:  # the same number once more would change nothing
                await _request_copies(link, stream, info.config, 1 + copies - wanted)
            if await _set_copies(link, stream, info.config, wanted):
                break
        else:
            await _request_copies(link, stream, info.config, copies)  # it is not left with one
            group = (await stream_info(link, stream)).cluster or RaftGroup()
            current = [group.leader, *(one.name for one in group.replicas if one.current)]
            raise InfrastructureError(
                f"the cluster does not make {wanted} copies of stream {stream}: it has those on {', '.join(current)}. "
                "Look at the servers' logs, and repeat this"
            )


def _refuse_away(stream: str, group: RaftGroup) -> None:
    away = sorted(copy.name for copy in group.replicas if copy.offline)
    if away:
        raise ConfigError(
            f"server {', '.join(away)} is away, and with it a copy of stream {stream} that may differ from the others: "
            "start it, or take it out of the cluster for ever (`nats server cluster peer-remove`), then repeat this"
        )


async def _set_copies(link: ServerLink, stream: str, config: dict[str, Any], copies: int) -> bool:
    """Return whether the stream got so many copies, all of them current; not, if nothing moves for a while."""
    asked = await _request_copies(link, stream, config, copies)
    still, known = anyio.current_time(), RaftGroup()
    while True:
        group = (await stream_info(link, stream)).cluster or RaftGroup()
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
