"""Raises a notice when a service's process has no file descriptors, threads or memory left.

That shows in many guises: a connection that cannot be opened, a file that cannot be read, a rater that fails, a group
that is lost. Each looks like the fault of something else.
"""

import _thread
import errno
import mmap
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.runtime.service import Service

__all__ = ["FILES_CURE", "ReachedLimit", "has_all_files_open", "reached_limits", "report_limits"]

_LOOK_S = 5.0
_MUCH = 0.9
_SPARE_BYTES = 64 << 20
"""Memory that a process can still ask for unless it is short of it; nothing is written there."""
_FILES = "open files"
_MEMORY = "memory"
_THREADS = "threads"
_TOPICS = (_FILES, _MEMORY, _THREADS)
FILES_CURE = (
    "raise the limit (`ulimit -n`, LimitNOFILE of a unit; of the machine, fs.file-max) and start it again; if their "
    "number grows, its code leaves files open"
)
_SPACE_CURE = "raise the limit (`ulimit -v`, LimitAS of a unit) or give it less to do, and start it again"
_MEMORY_CURE = "let less run on this machine, or give it swap space or vm.overcommit_memory=0"
_THREADS_CURE = (
    "raise the limit (`ulimit -u`, LimitNPROC or TasksMax of a unit, pids.max of a container), or end what its user "
    "runs besides; if their number grows, its code leaves threads or processes behind"
)


class ReachedLimit(NamedTuple):
    """A limit that this process has reached: what to say of it, and how to mend it."""

    topic: str
    text: str
    mend: str


async def report_limits(service: Service) -> None:
    """Keep the notices of a process that runs out of something. Runs until cancelled."""
    while True:
        found = {one.topic: one for one in reached_limits()}
        for topic in _TOPICS:
            one = found.get(topic)
            if one is None:
                service.set_problem(topic, None)
            else:
                service.set_problem(topic, f"{service.name} {one.text}", mend=one.mend)
        await sleep_until_tick(_LOOK_S)


def reached_limits() -> Iterator[ReachedLimit]:
    """Yield the limits that this process has reached; one that it cannot find out is left out."""
    files = _describe_files()
    if files is not None:
        yield ReachedLimit(_FILES, files, FILES_CURE)
    memory = _find_memory()
    if memory is not None:
        yield memory
    elif not _can_start_thread():  # without memory, none can be started either
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = "" if limit == resource.RLIM_INFINITY else f", {limit} by `ulimit -u`"
        text = f"can start no more threads or processes: its user or its container has as many as it may{most}"
        yield ReachedLimit(_THREADS, text, _THREADS_CURE)


def has_all_files_open(pid: int) -> bool:
    """Return whether another process has as many files open as it may; not where that cannot be found out."""
    try:
        count = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        limits = Path(f"/proc/{pid}/limits").read_text()
    except OSError:
        return False
    limit = next((line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")), "")
    return limit.isdecimal() and count >= int(limit)


def _describe_files() -> str | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        count = sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    except OSError as error:
        if error.errno not in {errno.EMFILE, errno.ENFILE}:
            return None  # a machine without /proc
        if error.errno == errno.ENFILE:
            return "can open no files: this machine has as many open as it may"
        return f"can open no more files: its process has as many open as it may, {limit}"
    if limit == resource.RLIM_INFINITY or count < _MUCH * limit:
        return None
    return f"has {count} files open, of {limit} that its process may have"


def _find_memory() -> ReachedLimit | None:
    try:
        mmap.mmap(-1, _SPARE_BYTES, flags=mmap.MAP_PRIVATE).close()
    except OSError:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return ReachedLimit(_MEMORY, "can have no more memory: this machine has promised all it has", _MEMORY_CURE)
        text = f"can have no more memory: its process has the {limit:,} bytes of address space that it may have"
        return ReachedLimit(_MEMORY, text, _SPACE_CURE)
    return None


def _can_start_thread() -> bool:
    try:
        _thread.start_new_thread(int, ())
    except RuntimeError:
        return False
    return True
