"""The logs of a run's processes: their newest lines, and those that come."""

import os
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import anyio

from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.run.supervisor_state import SUPERVISOR_LOG

__all__ = ["follow_logs", "log_files", "newest_lines"]

_TAIL_BYTES = 1 << 18
_MAX_READ_BYTES = 1 << 20
_LOOK_S = 0.3
"""Seconds between two looks at the files."""


def log_files(folder: Path, processes: Collection[str] = ()) -> dict[str, Path]:
    """Return the logs of a run by process, sorted; of `processes` alone, if any is named."""
    files = {file.stem: file for file in sorted((folder / "logs").glob("*.log"))}
    if (folder / SUPERVISOR_LOG).exists():
        files = {"supervisor": folder / SUPERVISOR_LOG, **files}
    return {name: file for name, file in files.items() if not processes or name in processes}


def newest_lines(file: Path, count: int) -> list[str]:
    """Return the last lines of a log; of a long one, those in its last 256 KiB. Raises `OSError`."""
    if count <= 0:
        return []
    with open_regular_file(file) as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _TAIL_BYTES))
        return opened.read().decode(errors="replace").splitlines()[-count:]


async def follow_logs(run: str, folder: Path, processes: Collection[str] = ()) -> AsyncIterator[tuple[str, str]]:
    """Yield the process and the line of whatever is logged from now on, until the run has ended."""
    seen = {name: file.stat().st_size for name, file in log_files(folder, processes).items()}
    while True:
        is_over = not look_at_folder(run, folder).is_live  # checked first, so that its last log lines are still read
        for name, file in log_files(folder, processes).items():
            for line in _read_from(file, seen, name):
                yield name, line
        if is_over:
            return
        await anyio.sleep(_LOOK_S)


def _read_from(file: Path, seen: dict[str, int], name: str) -> Iterator[str]:
    """Yield the whole lines after what was seen of the file, and take note of them."""
    with open_regular_file(file) as opened:
        size = opened.seek(0, os.SEEK_END)
        start = seen.get(name, 0)
        start = 0 if start > size else start  # the file was started over
        while start < size:
            opened.seek(start)
            part = opened.read(_MAX_READ_BYTES)
            end = part.rfind(b"\n") + 1
            if not end and len(part) < _MAX_READ_BYTES:
                break  # the line is still being written
            part = part[:end] if end else part
            start += len(part)
            yield from part.decode(errors="replace").splitlines()
        seen[name] = start
