"""Raises a notice when a service's process has no file descriptors left.

That shows in many guises: a connection that cannot be opened, a server that accepts none, a file that cannot be read.
Each looks like the fault of something else.
"""

import errno
import resource
from pathlib import Path
from typing import Final

import anyio

from lachesis.pipeline.runtime.service import Service

__all__ = ["OPEN_FILES_CURE", "describe_open_files", "report_open_files"]

_LOOK_S = 2.0
_MUCH = 0.9
_TOPIC = "open files"
OPEN_FILES_CURE: Final = (
    "raise the limit (`ulimit -n`, LimitNOFILE of a unit; of the machine, fs.file-max) and start it again; if their "
    "number grows, its code leaves files open"
)


async def report_open_files(service: Service) -> None:
    """Keep the notice of a process that runs out of file descriptors. Runs until cancelled."""
    while True:
        said = describe_open_files()
        if said is None:
            service.set_problem(_TOPIC, None)
        else:
            service.set_problem(_TOPIC, f"{service.name} {said}", mend=OPEN_FILES_CURE)
        await anyio.sleep(_LOOK_S)


def describe_open_files() -> str | None:
    """Return what to say of the files that this process has open; None: there is room for more."""
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
