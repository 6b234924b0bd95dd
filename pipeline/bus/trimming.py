"""Deletes history by subject. Keeps each subject's last message and chunks that are still needed."""

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.blobs import BlobStore
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.reader import ReadOptions, StreamReader, read
from lachesis.pipeline.bus.replies import PurgeAnswer
from lachesis.pipeline.bus.routing import LARGE_HEADER, MSG_ID_HEADER, chunks_subject, names_chunks
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.bus.streams import stored_subjects
from lachesis.pipeline.errors import DamagedError
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import BLOB_KINDS, blob, kind_of

__all__ = ["Note", "delete_all", "delete_orphan_chunks", "trim"]

log = logging.getLogger("lachesis")

Note = Callable[[Sequence[int]], Awaitable[None]]
"""Writes down which sequences are deleted next."""


async def trim(
    link: ServerLink, publisher: Publisher, blobs: BlobStore, stream: str, filters: Sequence[str], *, before: int
) -> int:
    """See `api.Bus.trim`."""
    purged = 0
    for subject in await stored_subjects(link, stream, filters):
        try:
            last = await publisher.last(stream, subject)
        except DamagedError as error:  # which message must stay is not known
            log.warning("nothing is trimmed on %s: %s", subject, error)
            continue
        limit = before if last is None else min(before, last.seq)
        if limit <= 1:
            continue  # nothing lies below; and the server takes a purge below sequence 0 or 1 for a purge of everything
        if await _may_be_large(link, stream, subject):
            # chunks first: if this is cut short, the heads are still there to find the rest by
            for head in await _headers(link, blobs, stream, [subject], before=limit):
                chunks = head.headers.get(LARGE_HEADER, "")
                if names_chunks(subject, chunks):  # the head may be forged, to have others' messages deleted
                    await _purge(link, stream, {"filter": chunks, "seq": head.seq})
        purged += await _purge(link, stream, {"filter": subject, "seq": limit})
    return purged


async def delete_all(link: ServerLink, stream: str, filters: Sequence[str], *, keep: int = 0) -> None:
    """See `NatsBus.delete_all`."""
    for subject in filters:
        await _purge(link, stream, {"filter": subject, "keep": keep} if keep else {"filter": subject})


async def delete_orphan_chunks(
    link: ServerLink, publisher: Publisher, blobs: BlobStore, stream: str, run: str, *, before_ns: int, note: Note
) -> int:
    """See `api.Bus.delete_orphan_chunks`.

    A message written behind chunks keeps their head out for good (see `blobs`). So what no head lists after that is
    listed by none, whatever its producer does.
    """
    kind = next((kind for kind, owner in BLOB_KINDS.items() if owner == kind_of(stream)), None)
    if kind is None:
        raise ConfigError(f"stream {stream} holds no chunks")
    if not await stored_subjects(link, stream, [blob(kind, run)]):
        return 0
    ends = {chunk.subject: chunk for chunk in await _headers(link, blobs, stream, [blob(kind, run)])}
    old = {subject: chunk.seq for subject, chunk in ends.items() if chunk.time_ns < before_ns}
    if not old:
        return 0
    head_subjects = [f"rl.{kind}.{run}.>"]
    orphans = old.keys() - await _listed(link, blobs, stream, head_subjects, start=min(old.values()))
    seen = max(chunk.seq for chunk in ends.values())
    for subject in orphans:
        await publisher.store(subject, b"", {MSG_ID_HEADER: f"{subject}/swept"})
    orphans -= await _listed(link, blobs, stream, head_subjects, start=seen)
    if not orphans:
        return 0
    chunks = await _headers(link, blobs, stream, [blob(kind, run)])
    await note([chunk.seq for chunk in chunks if chunk.subject in orphans])
    return sum([await _purge(link, stream, {"filter": subject}) for subject in sorted(orphans)])


async def _listed(link: ServerLink, blobs: BlobStore, stream: str, filters: Sequence[str], *, start: int) -> set[str]:
    """Return the chunk subjects that the heads from sequence `start` on name."""
    heads = await _headers(link, blobs, stream, filters, start=start)
    return {head.headers[LARGE_HEADER] for head in heads if LARGE_HEADER in head.headers}


async def _headers(
    link: ServerLink,
    blobs: BlobStore,
    stream: str,
    filters: Sequence[str],
    *,
    start: int = 1,
    before: int | None = None,
) -> list[StoredMessage]:
    """Return what is stored on `filters` from sequence `start` on and below `before`, without its data."""
    found = []
    reader = StreamReader(link, blobs, stream, filters, ReadOptions(start=start, headers_only=True, follow=False))
    async with read(reader):
        async for message in reader:
            if before is not None and message.seq >= before:
                break
            found.append(message)
    return found


async def _may_be_large(link: ServerLink, stream: str, subject: str) -> bool:
    """Whether there are chunks in `stream` that could belong to messages on `subject`."""
    if kind_of(stream) not in BLOB_KINDS.values():
        return False
    return bool(await stored_subjects(link, stream, [chunks_subject(subject)]))


async def _purge(link: ServerLink, stream: str, request: dict[str, str | int]) -> int:
    body = msgspec.json.encode(request)
    return (await link.call_api(PurgeAnswer, f"$JS.API.STREAM.PURGE.{stream}", body, what=f"trimming {stream}")).purged
