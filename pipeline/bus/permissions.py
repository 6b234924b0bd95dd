"""From the table of who may do what to what nats-server enforces: allowed and denied subjects for each identity. Pure.

Reading from a cursor makes a consumer with a random name, so it is allowed under any name but those of the competing
consumers, whose messages would otherwise be taken from them. Answers come back under a prefix of the identity's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from lachesis.pipeline.bus.kv import bucket_stream, value_subject
from lachesis.schemas.access import Access
from lachesis.schemas.subjects import BUCKETS

__all__ = ["Permissions", "account_config", "inbox_prefix", "permissions"]

_API = "$JS.API"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects as nats-server takes them; whatever is not allowed is refused, and denied goes before allowed."""

    publish: list[str]
    deny_publish: list[str]
    subscribe: list[str]


def inbox_prefix(identity: str) -> str:
    """Return the prefix of the subjects on which answers come back to an identity, and to no other."""
    return f"_INBOX_{identity}"


def permissions(identity: str, access: Access) -> Permissions:
    """Return what the server is to allow `identity`."""
    publish = [f"{_API}.INFO", *access.writes]
    publish += [value_subject(bucket, key) for bucket, key in access.sets]
    publish += [f"{inbox_prefix(asker)}.>" for asker in access.answers]
    for stream in _streams(access.measures):
        publish.append(f"{_API}.STREAM.INFO.{stream}")
    for stream in _streams(access.gets):
        publish += [f"{_API}.STREAM.MSG.GET.{stream}", f"{_API}.DIRECT.GET.{stream}"]
    for stream in _streams(access.reads):
        publish += [f"{_API}.CONSUMER.CREATE.{stream}.*", f"{_API}.CONSUMER.MSG.NEXT.{stream}.*"]
    for stream, durable in access.consumes:
        publish += [f"{_API}.CONSUMER.{verb}.{stream}.{durable}" for verb in ("CREATE", "MSG.NEXT")]
        # newer servers may put a domain and an account before the stream
        publish += [f"$JS.ACK.{stream}.{durable}.>", f"$JS.ACK.*.*.{stream}.{durable}.>"]
    publish += [f"{_API}.CONSUMER.INFO.{stream}.{durable}" for stream, durable in access.inspects]
    for stream in _streams(access.trims):
        publish.append(f"{_API}.STREAM.PURGE.{stream}")
    publish += [f"{_API}.CONSUMER.DELETE.{stream}.{durable}" for stream, durable in access.forgets]
    for stream in _streams(access.makes):
        publish += [f"{_API}.STREAM.CREATE.{stream}", f"{_API}.STREAM.UPDATE.{stream}"]
    deny = [*access.spares]
    deny += [f"{_API}.CONSUMER.{verb}.{stream}.{durable}" for stream, durable in access.others if stream in access.reads
            for verb in ("CREATE", "MSG.NEXT")]  # fmt: skip
    return Permissions(publish, deny, [*access.hears, f"{inbox_prefix(identity)}.>"])


def account_config(name: str, users: Mapping[str, tuple[str, Permissions]]) -> str:
    """Return an account with its users in nats-server's form; `users` are (public nkey, permissions) by identity."""
    lines = [f"{_quoted(name)} {{", "  jetstream: enabled", "  users: ["]
    for identity, (key, allowed) in users.items():
        lines += [
            f"    {{  # {identity}",
            f"      nkey: {key}",
            "      permissions: {",
            f"        publish: {{ allow: {_list(allowed.publish)}, deny: {_list(allowed.deny_publish)} }}",
            f"        subscribe: {{ allow: {_list(allowed.subscribe)} }}",
            "      }",
            "    }",
        ]
    return "\n".join([*lines, "  ]", "}", ""])


def _streams(names: Iterable[str]) -> list[str]:
    return [bucket_stream(name) if name in BUCKETS.values() else name for name in names]


def _list(subjects: list[str]) -> str:
    return "[" + ", ".join(map(_quoted, subjects)) + "]"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
