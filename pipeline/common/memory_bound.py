"""Bounds the memory that reading a stranger's file may take.

Formats that compress can ask for gigabytes in some kilobytes, and the libraries that read them allocate what the file
says. Guarantees that while a bound holds this process maps no more than so many bytes of data beyond what it had, and
that the bound is gone afterwards. Larger allocations raise `MemoryError`, as a library's own error or Python's.
"""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

__all__ = ["bounded_memory", "each_within"]

T = TypeVar("T")
_lock = threading.Lock()
_holders = 0
_before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@contextmanager
def bounded_memory(limit_bytes: int) -> Iterator[None]:
    """Bound the memory of this process; of several bounds at once the first one counts.

    There is none where the system does not say what is mapped.
    """
    global _holders, _before  # noqa: PLW0603 - the limit is the process's
    with _lock:
        _holders += 1
        mapped = _data_bytes()
        if _holders == 1 and mapped is not None:
            _before = resource.getrlimit(resource.RLIMIT_DATA)
            soft, hard = _before
            wanted = mapped + limit_bytes
            limit = wanted if soft == resource.RLIM_INFINITY else min(wanted, soft)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and mapped is not None:
                resource.setrlimit(resource.RLIMIT_DATA, _before)


def each_within(items: Iterator[T], limit_bytes: int) -> Iterator[T]:
    """Yield the items, each of which is made within the bound. Raises `MemoryError`."""
    while True:
        with bounded_memory(limit_bytes):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def _data_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:
        return None
