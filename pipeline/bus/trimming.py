"""Trimming: deleting history by subject, without taking a subject's last message or a chunk that is still needed."""

from collections.abc import Sequence

import msgspec

from lachesis.pipeline.bus.answers import Answer
from lachesis.pipeline.bus.blobs import Blobs
from lachesis.pipeline.bus.link import Link
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.reader import ReadOptions, StreamReader, read
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.bus.streams import stream_info

__all__ = ["trim"]


class _Purged(Answer, frozen=True):
    purged: int = 0


async def trim(
    link: Link, publisher: Publisher, blobs: Blobs, stream: str, filters: Sequence[str], *, before: int
) -> int:
    """See `api.Bus.trim`."""
    purged = 0
    for subject in await _subjects(link, stream, filters):
        last = await publisher.last(stream, subject)
        limit = before if last is None else min(before, last.seq)
        if limit <= 1:
            continue  # nothing lies below; and the server takes a purge below sequence 0 or 1 for a purge of everything
        # chunks first: if this is cut short, the heads are still there to find the rest by
        for chunks in await _large(link, blobs, stream, subject, limit):
            await _purge(link, stream, {"filter": chunks})
        purged += await _purge(link, stream, {"filter": subject, "seq": limit})
    return purged


async def _subjects(link: Link, stream: str, filters: Sequence[str]) -> list[str]:
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


async def _large(link: Link, blobs: Blobs, stream: str, subject: str, before: int) -> list[str]:
    """Return the chunk subjects of the large messages on `subject` below `before`."""
    found = []
    reader = StreamReader(link, blobs, stream, [subject], ReadOptions(headers_only=True, follow=False))
    async with read(reader):
        async for message in reader:
            if message.seq >= before:
                break
            if LARGE_HEADER in message.headers:
                found.append(message.headers[LARGE_HEADER])
    return found


async def _purge(link: Link, stream: str, request: dict[str, str | int]) -> int:
    body = msgspec.json.encode(request)
    return (await link.call(_Purged, f"$JS.API.STREAM.PURGE.{stream}", body, what=f"trimming {stream}")).purged
