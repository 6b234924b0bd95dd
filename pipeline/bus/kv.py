"""Key-value buckets: a stream with one message a key, in the layout that every NATS client knows as a bucket."""

import secrets

import msgspec

from lachesis.pipeline.bus.answers import Purged
from lachesis.pipeline.bus.api import Entry, Stored
from lachesis.pipeline.bus.link import Link
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, check_key
from lachesis.schemas.errors import DamagedError, FencedError

__all__ = ["bucket_stream", "delete", "put", "value", "value_subject"]


def bucket_stream(bucket: str) -> str:
    """Return the name of the stream behind a bucket."""
    return f"KV_{bucket}"


def value_subject(bucket: str, key: str) -> str:
    return f"$KV.{bucket}.{key}"


def _entry(key: str, message: Stored) -> Entry:
    return Entry(key, message.data, message.seq)


async def put(publisher: Publisher, bucket: str, key: str, data: bytes, *, revision: int | None) -> int:
    """See `api.Bus.put`."""
    check_key(bucket, key)
    subject, headers = value_subject(bucket, key), {MSG_ID_HEADER: secrets.token_hex(12)}
    if revision is None:
        return (await publisher.store(subject, data, headers)).seq
    try:
        return await publisher.commit(bucket_stream(bucket), subject, data, expected=revision, headers=headers)
    except FencedError as error:
        raise FencedError(f"bucket {bucket}, key {key}: revision is not {revision} any more") from error


async def value(publisher: Publisher, bucket: str, key: str) -> Entry | None:
    """See `api.Bus.value`."""
    check_key(bucket, key)
    try:
        message = await publisher.last(bucket_stream(bucket), value_subject(bucket, key))
    except DamagedError as error:
        stream, subject = bucket_stream(bucket), value_subject(bucket, key)
        raise DamagedError(
            f"bucket {bucket}, key {key}: there is a value, and the server cannot read it: its store is damaged. "
            "Restore it from a backup; in a cluster let another copy lead; or, to begin without what the key held, "
            f"`nats stream purge {stream} --subject '{subject}'`"
        ) from error
    return None if message is None else _entry(key, message)


async def delete(link: Link, bucket: str, key: str) -> None:
    """See `api.Bus.delete`. Purged, not marked as deleted: markers would fill the bucket just the same."""
    check_key(bucket, key)
    request = msgspec.json.encode({"filter": value_subject(bucket, key)})
    subject = f"$JS.API.STREAM.PURGE.{bucket_stream(bucket)}"
    await link.call(Purged, subject, request, what=f"deleting {key} of bucket {bucket}")
