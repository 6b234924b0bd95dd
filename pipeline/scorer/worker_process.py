"""Calls functions on untrusted answers in worker processes with bounds of time and memory.

An answer can keep a regular expression, a schema or a computer algebra system busy for ever, and a thread cannot be
ended from outside. A process can: it is killed when its caller gives up, and another one takes its place. Guarantees: a
call maps no more than `memory_bytes` beyond what the worker had before its first one, uses at most `_CPU_S` seconds of
processor time, also if the caller is gone, and leaves the worker's limits unchanged.
"""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_process

__all__ = ["AnswerTooLargeError", "WorkerEndedError", "WorkerProcesses", "call_within"]

_ATTEMPTS = 3
"""Workers that are tried: a worker ends itself if earlier calls have filled its memory."""
_CPU_S = 120
"""Seconds of processor time of one call: ends a worker whose parent is gone."""
_base_bytes: int | None = None
"""What this process had mapped before its first call."""
T = TypeVar("T")


class AnswerTooLargeError(Exception):
    """Raised when an answer takes more memory, or is nested deeper, than a call may take."""


class WorkerEndedError(Exception):
    """Raised when workers ended, one after the other, while they worked on the same answer."""


class WorkerProcesses:
    """`workers` processes at most, each with `memory_bytes` for a call."""

    def __init__(self, workers: int, memory_bytes: int) -> None:
        self.limiter = anyio.CapacityLimiter(workers)
        self._memory_bytes = memory_bytes

    async def call(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Return what `function`, of a module, returns. If this is cancelled its process is killed.

        Raises what the function raises, `AnswerTooLargeError`, and `WorkerEndedError` with `what` was done.
        """
        for _ in range(_ATTEMPTS):
            try:
                return await anyio.to_process.run_sync(
                    call_within, self._memory_bytes, function, args, cancellable=True, limiter=self.limiter
                )
            except anyio.BrokenWorkerProcess:
                continue
        raise WorkerEndedError(f"{_ATTEMPTS} worker processes ended while they {what}; is the machine out of memory?")


def call_within(memory_bytes: int, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Return `function(*args)`. Raises `AnswerTooLargeError` where that takes more than `memory_bytes`.

    The process ends itself, before it calls, if earlier calls have left more than half of that in its caches: the
    caller asks another one.
    """
    global _base_bytes  # noqa: PLW0603 - a fact of this process
    mapped = _mapped_bytes()
    if mapped is None:
        return function(*args)
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
        return function(*args)
    except MemoryError:
        why = f"the answer takes more than {memory_bytes >> 20} MiB to rate"
    except RecursionError:
        why = "the answer is nested too deeply to rate"
    finally:
        for kind, (soft, hard) in before.items():
            resource.setrlimit(kind, (soft, hard))
    raise AnswerTooLargeError(why)  # without the frames that hold what filled the memory


def _least(limit: int, hard: int) -> int:
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def _mapped_bytes() -> int | None:
    """Return the bytes this process has mapped, None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
