"""Removes the shared memory that a group of processes has left.

It removes the names that the processes had mapped, once all of them are gone. Python's own tracker usually does that,
but it is a process of the group and may be killed with it.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["has_processes", "remove_names", "shared_names"]

_FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory lies
_OWN = ("psm_", "sem.mp-")
"""What Python's `multiprocessing` calls its memory and semaphores. Other names may be meant to stay."""
_MAPPED = re.compile(rf" (\d+) +{_FOLDER}/", re.MULTILINE)
"""The inode: a process that makes a semaphore has it mapped under a temporary name."""


def shared_names(group: int) -> set[str]:
    """Return the names of the shared memory that processes of a group have mapped."""
    mapped: set[str] = set()
    for process in _members(group):
        with suppress(OSError):  # it has just ended
            mapped |= set(_MAPPED.findall((process / "maps").read_text(errors="replace")))
    found = set()
    for path in _FOLDER.iterdir() if mapped else ():
        with suppress(OSError):
            if path.name.startswith(_OWN) and str(path.stat().st_ino) in mapped:
                found.add(path.name)
    return found


def has_processes(group: int) -> bool:
    """Whether any process of a group is alive."""
    return any(True for _ in _members(group))


def remove_names(names: Iterable[str]) -> list[str]:
    """Remove the names that are left, and return them."""
    removed = []
    for name in sorted(names):
        with suppress(OSError):
            (_FOLDER / name).unlink()
            removed.append(name)
    return removed


def _members(group: int) -> Iterator[Path]:
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):
            state, _, its_group = (process / "stat").read_text(errors="replace").rpartition(") ")[2].split()[:3]
            if int(its_group) == group and state not in {"Z", "X"} and int(process.name) != os.getpid():
                yield process
