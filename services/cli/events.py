"""Formats events for people: plain values, a line of text or JSON, and `field=value` filters.

Turns a stored message and its channel into plain dictionaries, in which a binary column is its dtype and length, or its
values if the full event is requested. Pure; whatever the bytes are, nothing is raised.
"""

import base64
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.schemas.catalog import BINARY, Channel
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.services.output import json_text, printable

__all__ = ["FieldFilter", "json_line", "plain_values", "text_line", "to_plain"]

_IN_SUBJECT = {"v", "run", "env", "revision"}
_HIDDEN_FIELDS = {
    "stamps", "previous", "resolved", "producers", "term", "chain", "commit", "tokenizer_hash",
    "tasks", "task_successes", "task_judged",
}  # fmt: skip
"""Fields that serve the pipeline or `lachesis trace`, not a human reader."""
_ENVELOPE = ("stream", "subject", "seq", "time_ns")


def to_plain(message: StoredMessage, channel: Channel, *, full: bool = False) -> dict[str, Any]:
    """Return the event that `message` holds.

    What no event of the channel fits is `{"error": ..., "bytes": n}`.
    """
    errors = []
    for kind in channel.events:
        try:
            found: dict[str, Any] = plain_values(decode(kind, message.data), full=full)
        except SchemaError as error:
            errors.append(str(error))
        else:
            return found
    return {"bytes": len(message.data), **({"error": "; ".join(errors)} if errors else {})}


def plain_values(value: Any, *, full: bool) -> Any:
    """Return structs as dictionaries (array-like ones too), and bytes by what the catalog says they hold."""
    if isinstance(value, msgspec.Struct):
        binary = BINARY.get(type(value).__name__, {})
        found = {}
        for name in value.__struct_fields__:
            item = getattr(value, name)
            if item is msgspec.UNSET:
                continue
            if isinstance(item, bytes):
                dtype = binary.get(name, "bytes")
                item = _column(item, getattr(value, "dtype", dtype) if dtype == "dtype" else dtype, full=full)
            found[name] = plain_values(item, full=full)
        return found
    if isinstance(value, dict):
        return {str(key): plain_values(item, full=full) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item, full=full) for item in value]
    return _column(value, "bytes", full=full) if isinstance(value, bytes) else value


def _column(data: bytes, dtype: str, *, full: bool) -> Any:
    if dtype in {"bytes", "msgpack", "bits", "zlib"}:
        if not full:
            return {"dtype": dtype, "len": 8 * len(data) if dtype == "bits" else len(data)}
        if dtype == "bits":
            return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()
        if dtype == "msgpack":
            try:
                return msgspec.msgpack.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError):
                pass  # shown as what it is
        return base64.b64encode(data).decode()
    kind = np.dtype(dtype).newbyteorder("<")
    if not full:
        return {"dtype": dtype, "len": len(data) // kind.itemsize}
    return np.frombuffer(data, kind).tolist()


def json_line(message: StoredMessage, event: dict[str, Any]) -> str:
    """Return one line of JSON: where and when the message was stored, and the event."""
    return json_text({**{name: getattr(message, name) for name in _ENVELOPE}, "event": event})


def text_line(message: StoredMessage, event: dict[str, Any], *, full: bool = False) -> str:
    """Return one line for a person.

    Time (UTC), subject, sequence, and what the event says beyond its subject.

    Stamps, digests and positions are shown in full lines alone.
    """
    when = datetime.fromtimestamp(message.time_ns / 1e9, UTC).strftime("%H:%M:%S.%f")[:-3]
    reported = event if full else _without_machinery(event)
    what = " ".join(
        f"{key}={_short(value)}" for key, value in reported.items() if key not in _IN_SUBJECT and _any(value)
    )
    return printable(f"{when} {message.subject} {message.seq} {what}")


def _without_machinery(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_machinery(item) for key, item in value.items() if key not in _HIDDEN_FIELDS}
    return [_without_machinery(item) for item in value] if isinstance(value, list) else value


def _any(value: Any) -> bool:
    return value is not None and value not in ([], {}, "")


def _short(value: Any) -> str:
    if isinstance(value, dict):
        if value.keys() == {"dtype", "len"}:
            return f"{value['dtype']}[{value['len']}]"
        return "{" + " ".join(f"{printable(key)}={_short(item)}" for key, item in value.items() if _any(item)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_short(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(value))


@dataclass(frozen=True, slots=True)
class FieldFilter:
    """A filter `field=value`; the field is a dotted path, and in a list any element may match."""

    path: tuple[str, ...]
    value: str

    @classmethod
    def parse(cls, text: str, channels: Sequence[Channel]) -> "FieldFilter":
        """Read a filter.

        Raises `ConfigError` when it is malformed or no event of the channels has such a field.
        """
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ConfigError(f"--where {text!r}: write it as field=value")
        first = path.split(".")[0]
        events = itertools.chain.from_iterable(channel.events for channel in channels)
        known = {*_ENVELOPE, *(field for event in events for field in event.__struct_fields__)}
        if first not in known:
            raise ConfigError(f"--where {text!r}: no field {first!r} here; there are {', '.join(sorted(known))}")
        return cls(tuple(path.split(".")), value)

    def matches(self, message: StoredMessage, event: dict[str, Any]) -> bool:
        """Whether the event, or the message it came in, has this value there."""
        envelope = {name: getattr(message, name) for name in _ENVELOPE}
        return any(_text(leaf) == self.value for leaf in _leaves({**envelope, **event}, self.path))


def _leaves(value: Any, path: Sequence[str]) -> Iterator[Any]:
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item, path)
    elif not path:
        yield value
    elif isinstance(value, dict):
        for length in range(1, len(path) + 1):  # a key may hold dots itself
            key = ".".join(path[:length])
            if key in value:
                yield from _leaves(value[key], path[length:])


def _text(value: Any) -> str:
    """The value as one writes it in a filter: strings bare, the rest as JSON."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
