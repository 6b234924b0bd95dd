"""Saves what only another server's copy of a stream holds, before the leader's replaces it.

In a cluster whose majority came back with older stores the remaining server may be the only one that still has the
newest messages. They are written to files in the run's folder; a recovery stores the rollouts among them again.
"""

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.common.fsync import fsync, make_folder, partial_of
from lachesis.pipeline.errors import NotFoundError, StartupError
from lachesis.pipeline.retention.recovery_record import SavedCopy
from lachesis.schemas import subjects
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import ROLLOUTS

__all__ = ["SavedMessage", "read_saved_rollouts", "save_other_copies"]

log = logging.getLogger("lachesis")


class SavedMessage(msgspec.Struct, frozen=True):
    """A line of such a file. `time_ns`: when it was stored, Unix time; `data`: in base64."""

    subject: str
    seq: int
    time_ns: int
    headers: dict[str, str]
    data: bytes


async def save_other_copies(bus: NatsBus, streams: Sequence[str], folder: Path, prefix: str) -> list[SavedCopy]:
    """Write into files what copies hold and the leader's does not, or has another message in place of.

    They are in `folder`, and their names begin with `prefix`; a stream whose copies are all the same gets none. Safe to
    repeat.

    Raises `StartupError` where they cannot be written, `ConfigError` where a server is away.
    """
    found: list[SavedCopy] = []
    make_folder(folder)
    for stream in streams:
        leader, *others = await bus.servers_of(stream) or [""]
        for number, server in enumerate(sorted(others), 1):
            path = folder / f"{prefix}.{stream}.{number}.jsonl"
            try:
                messages = await _save(bus, stream, leader, server, path)
            except OSError as error:
                raise StartupError(
                    f"{path}, which is to hold what only the copy of {stream} on {server} has, cannot be written: "
                    f"{error.strerror}. No copy was changed. Mend that, and repeat this"
                ) from error
            if messages:
                log.warning("what only the copy of %s on %s has is saved in %s: %s",
                            stream, server, path, "1 message" if messages == 1 else f"{messages} messages")  # fmt: skip
                found.append(SavedCopy(stream=stream, server=server, file=path.name, messages=messages))
    return found


async def read_saved_rollouts(bus: NatsBus, folder: Path, saved: Sequence[SavedCopy]) -> AsyncGenerator[StoredMessage]:
    """Yield the rollouts in saved copies, whole, each once.

    One that lacks a chunk is passed over with a warning.
    """
    seen: set[tuple[int, int]] = set()
    for copy in saved:
        if copy.stream != ROLLOUTS:
            continue
        path = folder / copy.file
        chunks = {saved.seq: place for place, saved in _read(path) if not _is_rollout(bus.run, saved)}

        async def fetch(
            stream: str, seqs: Sequence[int], path: Path = path, chunks: dict[int, int] = chunks
        ) -> AsyncGenerator[StoredMessage]:
            for seq in seqs:
                yield _read_at(path, chunks[seq]) if seq in chunks else await bus.get(stream, seq)

        for _, one in _read(path):
            if not _is_rollout(bus.run, one) or (one.seq, one.time_ns) in seen:
                continue
            seen.add((one.seq, one.time_ns))
            message = _stored(one)
            try:
                yield await bus.join(message, fetch) if LARGE_HEADER in message.headers else message
            except (DataError, NotFoundError) as error:
                log.warning("rollout %d of %s cannot be stored again: %s", one.seq, path, error)


async def _save(bus: NatsBus, stream: str, leader: str, server: str, path: Path) -> int:
    """Write the messages that `server` alone has, and return their number; without any, there is no file."""
    start = await _first_to_compare(bus, stream, leader, server)
    partial, count, encoder = partial_of(path), 0, msgspec.json.Encoder()
    with partial.open("wb") as file:
        async with (
            aclosing(bus.read_copy(stream, leader, start=start, headers_only=True)) as leading,
            aclosing(bus.read_copy(stream, server, start=start)) as copied,
        ):
            led = await anext(leading, None)
            async for message in copied:
                while led is not None and led.seq < message.seq:
                    led = await anext(leading, None)
                if not _is_same(led, message):
                    line = SavedMessage(
                        subject=message.subject,
                        seq=message.seq,
                        time_ns=message.time_ns,
                        headers=dict(message.headers),
                        data=message.data,
                    )
                    file.write(encoder.encode(line) + b"\n")
                    count += 1
    if count:
        fsync(partial)
        partial.replace(path)
        fsync(path.parent)
    else:
        partial.unlink()
    return count


async def _first_to_compare(bus: NatsBus, stream: str, leader: str, server: str) -> int:
    """Return a sequence up to which two copies are the same: the two only part once, so it is sought from the end."""
    end, back = (await bus.usage(stream)).last, 0
    while (start := max(1, end - back)) > 1:
        led = await _first_from(bus, stream, leader, start)
        if _is_same(led, await _first_from(bus, stream, server, start)):
            break
        back = 2 * back + 1
    return start


async def _first_from(bus: NatsBus, stream: str, server: str, start: int) -> StoredMessage | None:
    async with aclosing(bus.read_copy(stream, server, start=start, headers_only=True, limit=1)) as messages:
        return await anext(messages, None)


def _is_same(led: StoredMessage | None, copied: StoredMessage | None) -> bool:
    """Return whether the leader and another copy hold the same message."""
    return led is not None and copied is not None and (led.seq, led.time_ns) == (copied.seq, copied.time_ns)


def _is_rollout(run: str, saved: SavedMessage) -> bool:
    return saved.subject.startswith(subjects.rollout(run).removesuffix("*"))


def _read(path: Path) -> Iterator[tuple[int, SavedMessage]]:
    """Yield each message with the place of its line in the file, bytes."""
    decoder, place = msgspec.json.Decoder(SavedMessage), 0
    with path.open("rb") as file:
        for line in file:
            yield place, decoder.decode(line)
            place += len(line)


def _read_at(path: Path, place: int) -> StoredMessage:
    with path.open("rb") as file:
        file.seek(place)
        return _stored(msgspec.json.decode(file.readline(), type=SavedMessage))


def _stored(saved: SavedMessage) -> StoredMessage:
    return StoredMessage(ROLLOUTS, saved.subject, saved.seq, saved.data, saved.time_ns, saved.headers)
