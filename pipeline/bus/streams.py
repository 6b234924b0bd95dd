"""Makes a run's streams and its bucket on the server, or changes them in place if they differ.

`ensure` may run at any time, from any number of processes: it ends with the same streams. What the server
cannot change in place (storage, retention) is an error that names the stream, never a deletion. Further copies
(`replicas`) are made by the cluster in the background, of the streams and of their consumers.
"""

import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.replies import (
    DeleteAnswer,
    StreamInfo,
    StreamList,
    StreamNames,
    SubjectsOverlapError,
    error_in,
    to_ns,
)
from lachesis.pipeline.bus.server_link import ServerLink, is_no_responder
from lachesis.pipeline.errors import InfrastructureError, NotFoundError, StreamFullError
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.schemas.subjects import (
    BUCKET,
    BUCKET_TEXT,
    STREAM_TEXTS,
    STREAMS,
    key_change,
    kind_of,
    run_of_stream,
    stream_name,
    stream_subjects,
    value_subject,
)

__all__ = [
    "StreamDescription",
    "definitions",
    "delete",
    "describe",
    "differences",
    "ensure",
    "missing",
    "reserved_bytes",
    "runs",
    "sized",
    "stored_subjects",
    "stream_info",
    "to_usage",
    "try_reservation",
]

log = logging.getLogger("lachesis")

_NS = 1_000_000_000
_JOIN_S = 10.0
"""Seconds for which servers that are known are waited for while they join their cluster."""
_JOIN_POLL_S = 0.25
_FIXED = ("storage", "retention")
_MAX_OWNERS_SHOWN = 6
_PROBE_S, _PROBE_END_S = 3.0, 10.0
_MAX_LISTED = 200_000
"""Sequences that the server lists in one answer."""


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream or bucket as the server has it."""

    name: str
    subjects: list[str]
    replicas: int
    usage: StreamUsage


def definitions(run: str, config: StreamsConfig) -> list[dict[str, Any]]:
    """Return the definition of each stream of the run, and of its bucket, in the server's own form."""
    common: dict[str, Any] = {
        "retention": "limits",
        "storage": "file",
        "discard": "new",  # a full stream refuses; it never drops what somebody may still need
        "max_age": 0,
        "max_msgs": -1,
        "num_replicas": config.replicas,
        "duplicate_window": int(config.duplicate_window_s * _NS),
        "allow_direct": True,
        "deny_delete": True,  # single messages stay; trimming purges by subject
    }
    streams = [
        {
            **common,
            "name": stream_name(run, kind),
            "description": f"{STREAM_TEXTS[kind]}, of run {run}",
            "subjects": subjects,
            "max_bytes": config.budgets()[kind],
            "max_msgs_per_subject": -1,
        }
        for kind, subjects in stream_subjects(run).items()
    ]
    bucket = {
        **common,
        "name": stream_name(run, BUCKET),
        "description": f"{BUCKET_TEXT}, of run {run}",
        "subjects": [value_subject(run, ">")],
        "max_bytes": config.bucket_bytes,
        "max_msgs_per_subject": 1,
        "allow_rollup_hdrs": False,  # a rollup of one key may take all others with it, whosever they are
        "allow_msg_ttl": True,  # for the marks of deleted keys
        # watchers of a key learn of a new value and then read it
        "republish": {"src": value_subject(run, ">"), "dest": key_change(run, ">"), "headers_only": True},
    }
    return [bucket, *streams]  # the bucket first, and deleted last: it says what becomes of the run


def sized(definition: dict[str, Any], current: dict[str, Any], config: StreamsConfig) -> dict[str, Any]:
    """Return a definition in which a stream keeps a size that is larger than a budget which is not set.

    `current`: the stream's definition on the server.
    """
    if kind_of(definition["name"]) not in config.budgets().keys() - config.set_budgets().keys():
        return definition
    return {**definition, "max_bytes": max(definition["max_bytes"], int(current.get("max_bytes", -1)))}


async def stream_info(link: ServerLink, name: str, request: dict[str, Any] | None = None) -> StreamInfo:
    """Return what the server says of a stream. Raises `NotFoundError`."""
    body = msgspec.json.encode(request) if request else b""
    return await link.call_api(StreamInfo, f"$JS.API.STREAM.INFO.{name}", body, what=f"stream {name}")


async def missing(link: ServerLink, stream: str) -> list[tuple[int, int]] | None:
    """See `NatsBus.missing`."""
    state = (await stream_info(link, stream)).state
    if state.num_deleted > _MAX_LISTED:
        return None
    if state.num_deleted:
        state = (await stream_info(link, stream, {"deleted_details": True})).state
    gone = [*([(1, state.first_seq - 1)] if state.first_seq > 1 else []), *((seq, seq) for seq in state.deleted or [])]
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(gone):
        if ranges and ranges[-1][1] + 1 >= first:
            ranges[-1] = ranges[-1][0], max(last, ranges[-1][1])
        else:
            ranges.append((first, last))
    return ranges


async def stored_subjects(link: ServerLink, stream: str, filters: Sequence[str]) -> list[str]:
    """Return the subjects within `filters` that messages of a stream are on, in order.

    Raises `NotFoundError`.
    """
    found: set[str] = set()
    for pattern in filters:
        offset = 0
        while True:
            info = await stream_info(link, stream, {"subjects_filter": pattern, "offset": offset})
            page = info.state.subjects or {}
            found.update(page)
            offset += len(page)
            if not page or offset >= info.total:
                break
    return sorted(found)


def to_usage(info: StreamInfo) -> StreamUsage:
    state = info.state
    return StreamUsage(
        max(state.first_seq, 1),
        state.last_seq,
        state.messages,
        state.bytes,
        int(info.config.get("max_bytes", -1)),
        state.lost.bytes if state.lost else 0,
        to_ns(state.last_ts) if state.last_seq else 0,
        info.created,
    )


async def ensure(link: ServerLink, config: StreamsConfig) -> list[str]:
    """Create or change the run's streams.

    Return one line for each thing done, none when all was as it should be.

    Raises `ConfigError` where a stream cannot become what it should be.
    """
    wanted = definitions(link.run, config)
    return [line for definition in wanted if (line := await _ensure_one(link, definition, config)) is not None]


async def _ensure_one(link: ServerLink, wanted: dict[str, Any], config: StreamsConfig) -> str | None:
    name = wanted["name"]
    try:
        current = (await stream_info(link, name)).config
    except NotFoundError:
        await _write(link, "CREATE", wanted)
        return f"created {name}"
    wanted = sized(wanted, current, config)
    changes = differences(current, wanted)
    if not changes:
        return None
    text = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in sorted(changes.items()))
    if any(key in changes for key in _FIXED):
        raise ConfigError(
            f"stream {name} exists and cannot be changed in place ({text}); use another account or server, or back it "
            f"up and delete it with `nats stream rm {name}`"
        )
    await _write(link, "UPDATE", {**current, **wanted})
    return f"changed {name}: {text}"


def differences(current: dict[str, Any], wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what a stream's definition on the server has otherwise than wanted: (is, should be) by key."""
    return {key: (current.get(key), value) for key, value in wanted.items() if current.get(key, _zero(value)) != value}


def _zero(value: object) -> object:
    """Return what the server leaves out of its answer for a field of this kind."""
    return type(value)() if isinstance(value, (bool, int, str)) else None


async def _write(link: ServerLink, action: str, definition: dict[str, Any]) -> None:
    name = definition["name"]
    try:
        await _placed(link, action, definition)
    except StreamFullError as error:
        raise ConfigError(
            f"the server has no room for stream {name} with a budget of {definition['max_bytes']:,} bytes "
            f"({error}){_reserved_text(await reserved_bytes(link))}: lower streams.*_bytes, delete a run that is over "
            "(`lachesis runs delete`), or raise what limits it: server.max_file_bytes of the run's own server, "
            "elsewhere max_file in the server's jetstream block or the account's max_storage"
        ) from error
    except SubjectsOverlapError as error:
        raise await _overlap(link, definition, error) from error
    except ConfigError as error:
        raise ConfigError(
            f"stream {name} is to have {definition['num_replicas']} copies, but too few servers run that have room for "
            f"one: start more of the cluster, or lower streams.replicas ({error})"
        ) from error
    except InfrastructureError as error:
        link.check()
        raise ConfigError(f"the server refuses stream {name}: {error}") from error


async def _placed(link: ServerLink, action: str, definition: dict[str, Any]) -> None:
    """Create or change a stream; servers that are known and join their cluster just now are waited for."""
    name, copies = definition["name"], definition["num_replicas"]
    until_s, is_logged = anyio.current_time() + _JOIN_S, False
    while True:
        try:
            await link.call_api(
                StreamInfo, f"$JS.API.STREAM.{action}.{name}", msgspec.json.encode(definition), what=f"stream {name}"
            )
        except ConfigError as error:
            if len(link.nc.servers) < copies or anyio.current_time() > until_s:
                raise
            if not is_logged:
                log.warning("stream %s has no place for %d copies yet; waiting for servers (%s)", name, copies, error)
                is_logged = True
            await anyio.sleep(_JOIN_POLL_S)  # a server says nowhere else that it is ready for copies
        else:
            return


async def describe(link: ServerLink) -> list[StreamDescription]:
    """Return the run's streams, then its bucket, those of them that exist."""
    found = []
    for kind in [*STREAMS, BUCKET]:
        name = stream_name(link.run, kind)
        try:
            info = await stream_info(link, name)
        except NotFoundError:
            continue
        found.append(StreamDescription(name, info.config["subjects"], int(info.config["num_replicas"]), to_usage(info)))
    return found


async def delete(link: ServerLink, name: str) -> None:
    """Delete a stream, if it is there."""
    with suppress(NotFoundError):
        await link.call_api(DeleteAnswer, f"$JS.API.STREAM.DELETE.{name}", b"", what=f"stream {name}")


async def runs(link: ServerLink) -> list[str]:
    """Return the runs that have streams on the server, in order."""
    found = {run_of_stream(name) for name in await _names(link, ">") if kind_of(name) in STREAMS}
    return sorted(run for run in found if run is not None)


async def reserved_bytes(link: ServerLink) -> dict[str, int]:
    """Return what each run's streams may hold together, bytes; other streams count under their own names."""
    found: dict[str, int] = {}
    for info in await _list(link):
        name, size = str(info.config["name"]), int(info.config.get("max_bytes", -1))
        run = run_of_stream(name)
        owner = f"stream {name}" if run is None else f"run {run}"
        found[owner] = found.get(owner, 0) + max(0, size)
    return found


async def try_reservation(link: ServerLink, max_bytes: int, replicas: int) -> str | None:
    """Return why the server makes no stream of so many bytes; None: it does.

    An empty one is made and deleted. Raises `InfrastructureError` where it cannot be known: nothing answers, or this
    identity may make no streams.
    """
    name = f"lachesis-probe-{secrets.token_hex(8)}"
    definition = {
        "name": name,
        "subjects": [f"rl.probe.{name}"],
        "storage": "file",
        "max_bytes": max_bytes,
        "num_replicas": replicas,
        "discard": "new",
    }
    subject = f"$JS.API.STREAM.CREATE.{name}"
    link.optional.add(subject)  # an identity of a secured run may not, which ends nothing
    try:
        msg = await link.request_once(subject, msgspec.json.encode(definition), timeout_s=_PROBE_S)
        error = error_in(msg.data) if msg is not None else None
        if msg is None or is_no_responder(msg) or (error is not None and error.is_transient):
            raise InfrastructureError("the server does not answer a request to make a stream, or does not allow it")
        return None if error is None else error.description
    finally:
        if subject not in link.refused:
            with anyio.move_on_after(_PROBE_END_S, shield=True), suppress(LachesisError):
                await delete(link, name)


def _reserved_text(reserved: dict[str, int]) -> str:
    """Say who has reserved how much, the greatest first."""
    largest = sorted(reserved.items(), key=lambda one: -one[1])
    shown = [f"{owner} {size:,}" for owner, size in largest[:_MAX_OWNERS_SHOWN]]
    if len(largest) > len(shown):
        shown.append(f"{len(largest) - len(shown)} more {sum(size for _, size in largest[len(shown) :]):,}")
    return f". Reserved are, in bytes: {', '.join(shown)}" if shown else ""


async def _overlap(link: ServerLink, definition: dict[str, Any], error: SubjectsOverlapError) -> ConfigError:
    found: set[str] = set()
    for subject in definition["subjects"]:
        found.update(await _names(link, subject))
    found.discard(definition["name"])
    return ConfigError(
        f"stream {definition['name']} cannot be made: {', '.join(sorted(found)) or 'another stream'} stores the same "
        f"subjects ({error}); use another account or server"
    )


async def _names(link: ServerLink, subject: str) -> list[str]:
    """Return the names of the streams that store anything within `subject`."""
    found: list[str] = []
    while True:
        body = msgspec.json.encode({"subject": subject, "offset": len(found)})
        answer = await link.call_api(StreamNames, "$JS.API.STREAM.NAMES", body, what="names of streams")
        found += answer.streams or []
        if not answer.streams or len(found) >= answer.total:
            return found


async def _list(link: ServerLink) -> list[StreamInfo]:
    found: list[StreamInfo] = []
    while True:
        body = msgspec.json.encode({"offset": len(found)})
        answer = await link.call_api(StreamList, "$JS.API.STREAM.LIST", body, what="list of streams")
        found += answer.streams or []
        if not answer.streams or len(found) >= answer.total:
            return found
