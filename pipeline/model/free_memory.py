"""Returns how much memory this process can still allocate on a device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from lachesis.pipeline.common.machine_memory import free_on_machine

__all__ = ["free_bytes"]


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
