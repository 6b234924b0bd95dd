"""Returns the memory that machine or container can still give, and counts the kernel's kills for it."""

import ctypes
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "MemoryKills",
    "free_on_machine",
    "give_back_memory",
    "half_of_free_memory",
    "out_of_memory_kills",
    "resident_bytes",
]


class _GroupFiles(NamedTuple):
    """The files of a memory control group in bytes, and the row of `memory.stat` with what the kernel caches."""

    limit: str
    used: str
    cached: str


_VERSION_1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def half_of_free_memory() -> int:
    """Return the bytes that reading one file may take: half of what is free, or of the machine's memory."""
    free = free_on_machine()
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // 2


def give_back_memory() -> None:
    """Give the system what the C library keeps of freed blocks, where it is one that does (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process of this machine has, of which some may be shared; 0: not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def free_on_machine() -> int | None:
    """Return the bytes that the machine, or this container, can still give; None: not known.

    Swapping is not counted.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    found = [*_free_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))]
    if available is not None:
        found.append(int(available) * 1024)
    return min(found, default=None)


def _free_in_groups(root: Path, own: Path) -> Iterator[int]:
    """Yield what the limit of each control group of this process leaves, without what the kernel caches."""
    try:
        memberships = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, name in memberships:
        if not controllers:
            yield from _free_in_each(root, name, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _free_in_each(root / "memory", name, _VERSION_1)


def _free_in_each(root: Path, name: str, files: _GroupFiles) -> Iterator[int]:
    """Yield what a group's limit leaves, and those of the groups above it."""
    group = root / name.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            limit = (folder / files.limit).read_text().strip()
            if limit == "max":
                continue
            used = int((folder / files.used).read_text())
            cached = re.search(rf"^{files.cached} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            yield max(0, int(limit) - used + (int(cached[1]) if cached is not None else 0))
        except (OSError, ValueError):
            continue  # the root group has no such files; in a container, the groups above it are not seen


def out_of_memory_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory.

    0 where it does not say.
    """
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)


class MemoryKills:
    """Notes when this machine's kernel kills for lack of memory, a process of the run or another one.

    `count` returns how many it has killed; it is to be looked at about once a second. `within_s`: seconds between a
    kill and an end that it explains.
    """

    def __init__(self, count: Callable[[], int] = out_of_memory_kills, *, within_s: float = 3.0) -> None:
        self._read = count
        self._within_s = within_s
        self._count = count()
        self._last_s = -math.inf

    def poll(self, now_s: float) -> None:
        """Note whether it has killed since the last look."""
        count = self._read()
        if count > self._count:
            self._last_s = now_s
        self._count = count

    def were_just_now(self, now_s: float) -> bool:
        """Return whether it has killed just before `now_s`: then it may have been what ended there."""
        self.poll(now_s)
        return now_s - self._last_s <= self._within_s
