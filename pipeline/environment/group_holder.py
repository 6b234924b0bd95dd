"""Names the process that holds groups under way, so that its successor may go on with them at once.

Guarantees that of two processes with one name the first has ended: a process keeps the name by a lock in the run's
folder, which the system releases when it ends, however that happens, and not while it is only stopped. A second
process of the same replica, or one in another folder, has another name, and waits until the leases of the first have
run out.
"""

import fcntl
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

__all__ = ["holder_name"]

_FOLDER = "holders"


@contextmanager
def holder_name(folder: Path, producer: str) -> Iterator[str]:
    """Yield the name of this process of `producer`, which no other process gets while the context lasts.

    `folder`: the run's. Where it cannot be written to, the name is a new one.
    """
    path = folder / _FOLDER / producer
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+b", buffering=0)
    except OSError:
        yield _name(producer, _new_token())
        return
    with lock:
        yield _name(producer, _kept_token(lock))


def _kept_token(lock: FileIO) -> str:
    """Return what distinguishes the processes that hold this file, one after another, from all others."""
    new = _new_token()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.seek(0)
        kept = lock.read(64)
    except OSError:  # another process holds it
        return new
    if re.fullmatch(rb"[0-9a-f]{8}", kept):
        return kept.decode()
    with suppress(OSError):  # a full disk: then the successor has another name
        lock.truncate(0)
        lock.write(new.encode())
    return new


def _new_token() -> str:
    return secrets.token_hex(4)


def _name(producer: str, token: str) -> str:
    return f"{producer}.{token}"
