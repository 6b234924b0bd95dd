"""Finds wandb's files on disk, and reads which step of a run is the last that they hold.

wandb writes its file in blocks, so a trainer that is killed loses what it logged in the last one.
"""

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

__all__ = ["kept_folder", "offline_folders", "records", "run_id", "stored_step"]

_MAGIC = b":W&B"
_BLOCK_BYTES = 32768
_FILE_HEADER_BYTES = 7
_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a piece of a record."""
_WHOLE, _LAST = 1, 4


def run_id(name: str) -> str:
    """Return the id in wandb of a run of this name."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def kept_folder(folder: Path) -> Path:
    """Return where wandb keeps its files: in the run's `folder`, unless WANDB_DIR says it."""
    return Path(os.environ.get("WANDB_DIR") or folder) / "wandb"


def offline_folders(folder: Path, run_id: str) -> list[Path]:
    """Return the folders of a run's lives in wandb's `folder`, the oldest first."""
    return sorted(folder.glob(f"offline-run-*-{run_id}"))


def stored_step(folder: Path, run_id: str) -> int | None:
    """Return the last step in earlier lives' files, 0 if they hold none; None: there is no readable file.

    A life that was killed within its first block has left a file without a step: then the one before it counts.
    """
    files = [file for one in offline_folders(folder, run_id)[::-1] for file in one.glob(f"run-{run_id}.wandb")]
    for file in files:
        step = _last_step_of(file)
        if step != 0:
            return step
    return 0 if files else None


def _last_step_of(file: Path) -> int | None:
    """Return the last step in a file, 0 if it holds none, None if it cannot be read."""
    try:
        from wandb.proto.wandb_internal_pb2 import Record

        content = file.read_bytes()
    except (ImportError, OSError):
        return None
    if not _MAGIC.startswith(content[: len(_MAGIC)]):
        return None
    step = 0
    for data in records(content):
        record = Record()
        try:
            record.ParseFromString(data)
        except Exception:  # noqa: BLE001 - protobuf's own, of which it has several; a piece that was cut
            break
        if record.WhichOneof("record_type") == "history":
            step = int(record.history.step.num)
    return step


def records(content: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file of wandb's."""
    place, pieces = _FILE_HEADER_BYTES, b""
    while place + _HEADER.size <= len(content):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER.size:
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(content, place)
        place += _HEADER.size
        if kind == 0 or place + length > len(content):
            return
        pieces += content[place : place + length]
        place += length
        if kind in {_WHOLE, _LAST}:
            yield pieces
            pieces = b""
