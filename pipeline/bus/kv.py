"""Implements the run's key-value bucket.

It is a stream with one message a key, in the layout of every NATS client's buckets.
"""

import secrets

from lachesis.pipeline.bus.api import Entry, StoredMessage
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, check_key
from lachesis.pipeline.errors import DamagedError, FencedError
from lachesis.schemas.subjects import BUCKET, stream_name, value_subject

__all__ = ["delete", "put", "value"]

_OPERATION_HEADER = "KV-Operation"
_DELETED = {_OPERATION_HEADER: "DEL", "Nats-TTL": "5s"}
"""Marks a key as deleted. The server forgets the mark by itself, so marks do not fill the bucket."""


async def put(publisher: Publisher, run: str, key: str, data: bytes, *, revision: int | None) -> int:
    """See `api.Bus.put`."""
    check_key(key)
    stream, subject = stream_name(run, BUCKET), value_subject(run, key)
    headers = {MSG_ID_HEADER: secrets.token_hex(12)}
    if revision is None:
        return (await publisher.store(subject, data, headers)).seq
    try:
        return await publisher.commit(stream, subject, data, expected=revision, headers=headers)
    except FencedError as error:
        mark = None if revision else await publisher.last(stream, subject)
        if mark is None or not _is_mark(mark):
            raise FencedError(f"key {key} of run {run}: its revision is not {revision} any more") from error
    try:  # the key was deleted a moment ago
        return await publisher.commit(stream, subject, data, expected=mark.seq, headers=headers)
    except FencedError as error:
        raise FencedError(f"key {key} of run {run}: another writer set it first") from error


async def value(publisher: Publisher, run: str, key: str) -> Entry | None:
    """See `api.Bus.value`."""
    check_key(key)
    stream, subject = stream_name(run, BUCKET), value_subject(run, key)
    try:
        message = await publisher.last(stream, subject)
    except DamagedError as error:
        raise DamagedError(
            f"key {key} of run {run}: there is a value, and the server cannot read it: its store is damaged. "
            "Restore it from a backup; in a cluster let another copy lead; or start the server again, and "
            f"`lachesis runs recover {run}` makes the run go on with what is left; or, to begin without what the key "
            f"held, `nats stream purge {stream} --subject '{subject}'`, and then that command"
        ) from error
    return None if message is None or _is_mark(message) else Entry(key, message.data, message.seq)


async def delete(publisher: Publisher, run: str, key: str) -> None:
    """See `api.Bus.delete`. It takes no right but that to write the key."""
    check_key(key)
    await publisher.store(value_subject(run, key), b"", {**_DELETED, MSG_ID_HEADER: secrets.token_hex(12)})


def _is_mark(message: StoredMessage) -> bool:
    return _OPERATION_HEADER in message.headers
