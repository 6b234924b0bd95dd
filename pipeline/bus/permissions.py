"""What nats-server lets each identity publish and subscribe to, from the table of who may do what. Pure.

Consumers are made under names that belong to one identity, and of which it has a few for each stream. So nobody takes
messages from another's consumer, and nobody uses up the consumers that a stream may have.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lachesis.pipeline.bus.consumer_names import reader_names
from lachesis.pipeline.bus.kv import bucket_stream, value_subject
from lachesis.schemas.access import Access
from lachesis.schemas.subjects import BUCKETS, bucket_change

__all__ = ["ANSWERS", "API", "Permissions", "identity_in", "inbox_prefix", "permissions", "stored_as"]

API = "$JS.API"
_INBOX = "_INBOX_"
ANSWERS = "_R_.>"
"""Where the server expects answers to what other accounts asked. It makes these subjects; no client can name one."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects as nats-server takes them; whatever is not allowed is refused, and denied goes before allowed."""

    publish: list[str]
    deny_publish: list[str]
    subscribe: list[str]


def inbox_prefix(identity: str) -> str:
    """Return the prefix of the subjects on which answers come back to an identity, and to no other."""
    return f"{_INBOX}{identity}"


def identity_in(prefix: str) -> str | None:
    """Return the identity that has this prefix; None where the server does not tell identities apart."""
    return prefix.removeprefix(_INBOX) if prefix.startswith(_INBOX) and prefix != _INBOX else None


def permissions(identity: str, access: Access) -> Permissions:
    """Return what the server is to allow `identity`."""
    publish = [f"{API}.INFO", *access.writes, *access.tells, *(subject for _, subject in access.asks)]
    publish += [value_subject(bucket, key) for bucket, key in access.sets]
    if access.serves:
        publish.append(ANSWERS)
    if any(other == identity for other, _ in access.asks):
        publish.append(f"{inbox_prefix(identity)}.>")
    publish += [f"{API}.STREAM.INFO.{stream}" for stream in stored_as(access.measures)]
    for name in access.gets:
        publish += [f"{API}.{verb}.{stream}" for stream in stored_as([name])
                    for verb in ("STREAM.MSG.GET", *(() if name in BUCKETS.values() else ("DIRECT.GET",)))]  # fmt: skip
    publish += [f"{API}.DIRECT.GET.{stream}.{subject}" for stream, subject in access.rereads]
    publish += [f"{API}.CONSUMER.{verb}.{stream}.{name}" for stream in access.reads for name in reader_names(identity)
                for verb in ("CREATE", "MSG.NEXT")]  # fmt: skip
    for stream, durable in access.consumes:
        publish += [f"{API}.CONSUMER.{verb}.{stream}.{durable}" for verb in ("CREATE", "MSG.NEXT")]
        # newer servers may put a domain and an account before the stream
        publish += [f"$JS.ACK.{stream}.{durable}.>", f"$JS.ACK.*.*.{stream}.{durable}.>"]
    publish += [f"{API}.CONSUMER.INFO.{stream}.{durable}" for stream, durable in access.inspects]
    publish += [f"{API}.STREAM.PURGE.{stream}" for stream in stored_as(access.trims)]
    publish += [f"{API}.CONSUMER.NAMES.{stream}" for stream in stored_as(access.lists)]
    publish += [f"{API}.CONSUMER.DELETE.{stream}.*" for stream in stored_as(access.forgets)]
    publish += [f"{API}.STREAM.{verb}.{stream}" for stream in stored_as(access.makes)
                for verb in ("CREATE", "UPDATE", "LEADER.STEPDOWN")]  # fmt: skip
    changes = [bucket_change(bucket, key) for bucket, key in access.watches]
    return Permissions(
        list(dict.fromkeys(publish)),
        list(access.spares),
        [*access.hears, *access.serves, *changes, f"{inbox_prefix(identity)}.>"],
    )


def stored_as(names: Iterable[str]) -> list[str]:
    """Return the streams behind streams and buckets."""
    return [bucket_stream(name) if name in BUCKETS.values() else name for name in names]
