"""Returns how much memory the machine, or the container that this process is in, can still give."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_on_machine", "half_of_free_memory"]


def half_of_free_memory() -> int:
    """Return the bytes that reading one file may take: half of what is free, or of the machine's memory."""
    free = free_on_machine()
    if free is None:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // 2


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
    """Yield what the limit of each control group (version 2) of this process leaves, without what the kernel caches."""
    try:
        name = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = root / name.strip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((folder / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            yield max(0, int(limit) - used + (int(cached[1]) if cached is not None else 0))
        except (OSError, ValueError):
            continue  # the root group has no such files
