"""Returns how much memory this process can still allocate on a device."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["free_bytes", "free_on_machine"]


def free_bytes(device: torch.device) -> int | None:
    """Return how many bytes this process can still allocate on `device`; None: not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + unused)
    if device.type != "cpu":
        return None
    found = [free for free in (free_on_machine(), _free_within_limit()) if free is not None]
    return min(found, default=None)


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


def _free_within_limit() -> int | None:
    """Return what RLIMIT_AS leaves to this process; None: there is no such limit."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError):
        return None
