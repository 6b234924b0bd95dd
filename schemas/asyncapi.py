"""Describes the wire: an AsyncAPI 3 description of every subject, and a JSON Schema for each event.

`documents()` makes file names with their text from the catalog, the same bytes on every machine and Python version.
Messages travel as msgpack; the schemas describe the same maps, and mark what is binary there.
"""

import inspect
import json
from typing import Any

import msgspec

from lachesis.schemas import subjects
from lachesis.schemas.catalog import BINARY, CHANNELS, KEY_EVENTS, Channel
from lachesis.schemas.codec import SCHEMA_VERSION, Event
from lachesis.schemas.planning_header import PLAN_HEADER, ROLLOUT_HEADER, TRACEPARENT_HEADER

__all__ = ["CONTENT_TYPE", "asyncapi", "documents", "json_schema"]

CONTENT_TYPE = "application/vnd.msgpack"

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

_PARAMETERS = {
    "run": "Name of the run.",
    "env": "Name of the environment.",
    "revision": f"Which pass over the rollouts: `{subjects.LIVE}`, or the name of a re-scoring.",
    "name": "Name of one large message's chunks, 32 hex digits.",
    "trainer": "Name of the trainer.",
    "stage": "Name of the stage.",
    "partition": "Part of the stage's state, an environment say.",
    "service": "Name of the service.",
    "instance": "One life of one replica.",
}

_HEADERS = {
    "Nats-Msg-Id": "Identity of the message; a second one within the duplicate window is dropped.",
    TRACEPARENT_HEADER: "W3C trace context; the trace id is the group's id.",
    ROLLOUT_HEADER: "On logprobs: the sequence in ROLLOUTS of the group they belong to.",
    PLAN_HEADER: "On rollouts: form, group, sequences, samples, tokens, oldest policy step, epoch, counter, start in "
    "Unix ns, producer, lease and, in form 3, newest policy step, separated by blanks.",
}

_ABOUT = f"""\
Every subject of the rollout pipeline. Whatever speaks NATS and msgpack can be an environment, a rater or a trainer.

Messages are msgpack maps of schema version {SCHEMA_VERSION} (field `v`). Readers ignore unknown fields and refuse a
newer version. The schemas describe the same structure in JSON; a field with `x-msgpack: bin` is binary in msgpack and
base64 in JSON, and `x-dtype` says what it holds, little-endian. Streams are bounded in bytes and refuse new messages
when full."""


def documents() -> dict[str, str]:
    """Return every generated file: its name and its text."""
    files = {"asyncapi.json": asyncapi()}
    for event in _events():
        files[f"{event.__name__}.schema.json"] = json_schema(event)
    return {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}


def json_schema(event: type[Event]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of one event, self-contained."""
    (root,), components = msgspec.json.schema_components([event], ref_template="#/$defs/{name}")
    _mend(components)
    return {"$schema": _DIALECT, **root, "$defs": components}


def asyncapi() -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document."""
    events = _events()
    _, components = msgspec.json.schema_components(events, ref_template="#/components/schemas/{name}")
    _mend(components)
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Lachesis",
            "version": str(SCHEMA_VERSION),
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "channels": {channel.name: _channel(channel) for channel in _channels()},
        "operations": _operations(),
        "components": {
            "messages": {event.__name__: _message(event) for event in events},
            "schemas": components,
        },
    }


def _channels() -> list[Channel]:
    """The catalog's channels, and each key with typed values as the subject that the run's bucket stores it at."""
    found = [
        Channel(
            f"key_{key.partition('.')[0]}",
            subjects.value_subject("{run}", key),
            subjects.BUCKET,
            events,
            f"Values of the key {key} of the run's key-value bucket.",
            "the service it describes",
        )
        for key, events in KEY_EVENTS.items()
    ]
    return [*CHANNELS, *found]


def _events() -> list[type[Event]]:
    """Every event once, in the catalog's order."""
    found = {event: None for channel in _channels() for event in (*channel.events, channel.reply) if event is not None}
    return list(found)


def _channel(channel: Channel) -> dict[str, Any]:
    events = [*channel.events, *([channel.reply] if channel.reply else [])]
    return {
        "address": channel.address,
        "description": channel.about,
        "parameters": {name: {"description": _PARAMETERS[name]} for name in channel.parameters},
        "messages": {event.__name__: {"$ref": f"#/components/messages/{event.__name__}"} for event in events},
        "x-stream": None if channel.stream is None else subjects.stream_name("{run}", channel.stream),
        "x-writer": channel.writer,
    }


def _operations() -> dict[str, Any]:
    """Each channel as somebody outside meets it: stored and broadcast events are received, requests are sent."""
    found = {}
    for channel in _channels():
        where = f"#/channels/{channel.name}"
        messages = [{"$ref": f"{where}/messages/{event.__name__}"} for event in channel.events]
        if channel.reply is not None:
            reply = {"messages": [{"$ref": f"{where}/messages/{channel.reply.__name__}"}]}
            found[f"request_{channel.name}"] = {
                "action": "send", "channel": {"$ref": where}, "messages": messages, "reply": reply
            }  # fmt: skip
        elif messages:
            found[f"read_{channel.name}"] = {"action": "receive", "channel": {"$ref": where}, "messages": messages}
    return found


def _message(event: type[Event]) -> dict[str, Any]:
    return {
        "name": event.__name__,
        "contentType": CONTENT_TYPE,
        "headers": {
            "type": "object",
            "properties": {name: {"type": "string", "description": about} for name, about in _HEADERS.items()},
        },
        "payload": {"$ref": f"#/components/schemas/{event.__name__}"},
    }


def _mend(components: dict[str, Any]) -> None:
    """Dedent descriptions (only some Python versions do it by themselves) and say what binary fields hold."""
    for name, schema in components.items():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
        for field, dtype in BINARY.get(name, {}).items():
            for part in (schema["properties"][field], *schema["properties"][field].get("anyOf", [])):
                if part.get("contentEncoding") == "base64":
                    part.update({"x-msgpack": "bin", "x-dtype": dtype})
