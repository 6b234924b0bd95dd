"""A lock (turn) for pausing and resuming the policy's server.

Trainer and inference service take turns if trainer and server compute with the same weights in memory. Guarantees that
no update resumes a server that the trainer has paused to change the weights. A process that ends gives its turn back,
however it ends.
"""

import fcntl
from pathlib import Path
from typing import BinaryIO

import anyio

__all__ = ["acquire_weights_lock"]

_POLL_S = 0.01


async def acquire_weights_lock(folder: Path) -> BinaryIO:
    """Wait for the turn and return it: closing it gives it back. `folder`: that of the run's weights."""
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    turn = (folder / ".turn").open("ab")
    try:
        while True:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await anyio.sleep(_POLL_S)  # to wait in the kernel could not be cancelled
            else:
                return turn
    except BaseException:
        turn.close()
        raise
