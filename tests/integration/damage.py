"""Damage to a server's store, done while it is stopped: a byte of one message is changed, as a bad disk would."""

from pathlib import Path

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.schemas.subjects import kind_of

__all__ = ["cut_last_message", "damage_in_place", "damage_message", "drop_blocks", "truncate"]


def _blocks(store: Path, stream: str) -> list[Path]:
    """Return the blocks of a stream, which is named in full or by its kind."""
    found = [path for path in store.rglob("*.blk") if stream in (name := path.parent.parent.name, kind_of(name))]
    return sorted(found, key=lambda path: int(path.stem))


async def damage_message(server: EmbeddedServer, stream: str, marker: bytes) -> None:
    """Change the last byte of `marker`, which stands in one message alone, wherever it does."""
    await server.stop()
    hits = 0
    for block in _blocks(server.store, stream):
        data = block.read_bytes()
        hits += data.count(marker)
        block.write_bytes(data.replace(marker, marker[:-1] + bytes([marker[-1] ^ 1])))
    assert hits, f"no message of {stream} holds {marker!r}"
    await server.start()


async def truncate(server: EmbeddedServer, stream: str, marker: bytes) -> None:
    """Cut the store off in the middle of the message that holds `marker`."""
    await server.stop()
    block = next(block for block in reversed(_blocks(server.store, stream)) if marker in block.read_bytes())
    data = block.read_bytes()
    block.write_bytes(data[: data.index(marker) + len(marker) // 2])
    await server.start()


async def drop_blocks(server: EmbeddedServer, stream: str) -> None:
    """Make all that a stream holds unreadable, from the first block on."""
    await server.stop()
    for block in _blocks(server.store, stream):
        block.write_bytes(bytes(block.stat().st_size))
    await server.start()


def damage_in_place(store: Path, stream: str, marker: bytes) -> None:
    """Change the last byte of `marker` under a server that runs: it shows once that reads the file again."""
    hits = 0
    for block in _blocks(store, stream):
        data = block.read_bytes()
        with block.open("r+b") as file:
            at = data.find(marker)
            while at >= 0:
                file.seek(at + len(marker) - 1)
                file.write(bytes([marker[-1] ^ 1]))
                hits += 1
                at = data.find(marker, at + 1)
    assert hits, f"no message of {stream} holds {marker!r}"


def cut_last_message(store: Path, stream: str) -> None:
    """Cut the newest message off a stream, or off the bucket, as a disk does that loses its end."""
    block = _blocks(store, stream)[-1]
    data = block.read_bytes()
    starts = [0]
    while (at := starts[-1] + (int.from_bytes(data[starts[-1] : starts[-1] + 4], "little") & 0x7FFFFFFF)) < len(data):
        starts.append(at)
    block.write_bytes(data[: starts[-1]])
