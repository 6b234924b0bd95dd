"""Compares answers in a worker process, within bounds of memory and processor time."""

import os
import resource
from pathlib import Path

from lachesis.pipeline.scoring.raters.math_equal import equal

__all__ = ["compare_within"]

_CPU_S = 120
"""Seconds of processor time of one comparison: ends a worker whose parent is gone."""
_base_bytes: int | None = None
"""What this process had mapped before its first comparison."""


def compare_within(gold: str, given: str, memory_bytes: int) -> bool | None:
    """Return `equal(gold, given)`; False where it takes more than `memory_bytes`, the answer's doing.

    The process ends itself, before it compares, if earlier comparisons have left more than half of that in its caches:
    the caller asks another one.
    """
    global _base_bytes  # noqa: PLW0603 - a fact of this process
    mapped = _mapped_bytes()
    if mapped is None:
        return equal(gold, given)
    if _base_bytes is None:
        _base_bytes = mapped
    if mapped > _base_bytes + memory_bytes // 2:
        os._exit(0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_AS: _base_bytes + memory_bytes,
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + _CPU_S,
    }
    before = {kind: resource.getrlimit(kind) for kind in limits}
    try:
        for kind, limit in limits.items():
            resource.setrlimit(kind, (_least(limit, before[kind][1]), before[kind][1]))
        return equal(gold, given)
    except (MemoryError, RecursionError):
        return False
    finally:
        for kind, (soft, hard) in before.items():
            resource.setrlimit(kind, (soft, hard))


def _least(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _mapped_bytes() -> int | None:
    """Return the bytes this process has mapped, None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
