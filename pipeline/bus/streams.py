"""The streams and buckets on the server: made where missing, changed in place where they differ.

`ensure_streams` may run at any time, from any number of processes: it ends with the same streams. What the server
cannot change in place (storage, retention) is an error that names the stream, never a deletion. Further copies
(`replicas`) are made by the cluster in the background, of the streams and of their consumers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lachesis.pipeline.bus.answers import StreamInfo
from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.kv import bucket_stream
from lachesis.pipeline.bus.link import Link
from lachesis.schemas.errors import ConfigError, InfrastructureError, NotFoundError, StreamFullError
from lachesis.schemas.subjects import BUCKET_TEXTS, BUCKETS, STREAM_TEXTS, STREAMS, bucket_change

__all__ = [
    "StreamDescription",
    "definitions",
    "describe",
    "differences",
    "ensure",
    "stored_subjects",
    "stream_info",
    "to_usage",
]

_NS = 1_000_000_000
_FIXED = ("storage", "retention")


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream or bucket as the server has it."""

    name: str
    subjects: list[str]
    replicas: int
    usage: StreamUsage


def definitions(config: StreamsConfig) -> list[dict[str, Any]]:
    """Return every stream's definition in the server's own form."""
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
            "name": name,
            "description": STREAM_TEXTS[name],
            "subjects": subjects,
            "max_bytes": config.budgets()[name],
            "max_msgs_per_subject": -1,
        }
        for name, subjects in STREAMS.items()
    ]
    buckets = [
        {
            **common,
            "name": bucket_stream(bucket),
            "description": BUCKET_TEXTS[kind],
            "subjects": [f"$KV.{bucket}.>"],
            "max_bytes": config.bucket_bytes,
            "max_msgs_per_subject": 1,
            "allow_rollup_hdrs": True,
            # whoever watches a key is told of a new value, and then reads it
            "republish": {"src": f"$KV.{bucket}.>", "dest": bucket_change(bucket, ">"), "headers_only": True},
        }
        for kind, bucket in BUCKETS.items()
    ]
    return streams + buckets


async def stream_info(link: Link, name: str, request: dict[str, Any] | None = None) -> StreamInfo:
    """Return what the server says of a stream. Raises `NotFoundError`."""
    body = msgspec.json.encode(request) if request else b""
    return await link.call(StreamInfo, f"$JS.API.STREAM.INFO.{name}", body, what=f"stream {name}")


async def stored_subjects(link: Link, stream: str, filters: Sequence[str]) -> list[str]:
    """Return the subjects within `filters` that messages of a stream are on, in order. Raises `NotFoundError`."""
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
    )


async def ensure(link: Link, config: StreamsConfig) -> list[str]:
    """Create or change the streams; return one line for each thing done, none when all was as it should be.

    Raises `ConfigError` where a stream cannot become what it should be.
    """
    return [line for wanted in definitions(config) if (line := await _ensure_one(link, wanted)) is not None]


async def _ensure_one(link: Link, wanted: dict[str, Any]) -> str | None:
    name = wanted["name"]
    try:
        current = (await stream_info(link, name)).config
    except NotFoundError:
        await _write(link, "CREATE", wanted)
        return f"created {name}"
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


async def _write(link: Link, action: str, definition: dict[str, Any]) -> None:
    name = definition["name"]
    try:
        await link.call(
            StreamInfo, f"$JS.API.STREAM.{action}.{name}", msgspec.json.encode(definition), what=f"stream {name}"
        )
    except StreamFullError as error:
        raise ConfigError(
            f"the server has no room for stream {name} with a budget of {definition['max_bytes']} bytes ({error}): "
            "lower streams.*_bytes, or raise what limits it: server.max_file_bytes of the run's own server, elsewhere "
            "max_file in the server's jetstream block or the account's max_storage"
        ) from error
    except ConfigError as error:
        raise ConfigError(
            f"stream {name} is to have {definition['num_replicas']} copies, but too few servers run that have room for "
            f"one: start more of the cluster, or lower streams.replicas ({error})"
        ) from error
    except InfrastructureError as error:
        link.check()
        raise ConfigError(f"the server refuses stream {name}: {error}") from error


async def describe(link: Link) -> list[StreamDescription]:
    """Return every stream and bucket that exists, in the order of the definitions."""
    found = []
    for name in [*STREAMS, *map(bucket_stream, BUCKETS.values())]:
        try:
            info = await stream_info(link, name)
        except NotFoundError:
            continue
        found.append(StreamDescription(name, info.config["subjects"], int(info.config["num_replicas"]), to_usage(info)))
    return found
