"""The choice of held-out tasks: a function of seed, environment and pool, the same in every process.

Guarantees that a smaller choice is the beginning of a larger one, so that evaluations on fewer tasks are on some of the
same tasks, and that neither a restart nor another version of Python or NumPy changes it: the raw output of PCG64 is
stable, unlike that of NumPy's distributions and of Python's `random.sample`.
"""

import hashlib
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", np.float32, np.float64)

__all__ = ["MIN_HELD_OUT_TASKS", "choose_held_out", "mask_held_out"]

MIN_HELD_OUT_TASKS = 8
"""A pool of which fewer would be held out is trained on whole: the error of a rate is estimated from the spread between
tasks. With 8 of them a change beyond three of its errors comes about by chance once in 100 comparisons (Student's t,
7 degrees of freedom), with 4 once in 35."""


def choose_held_out(seed: int, env: str, size: int, *, share: float, most: int) -> NDArray[np.int64]:
    """Return the indices of the tasks that are held out of a pool of `size`.

    Int64 [n] in the order of the choice.

    n is `share` of the pool, rounded down, and at most `most`; none are held out where that is below
    `MIN_HELD_OUT_TASKS`.
    """
    count = min(int(share * size + 1e-9), most)  # .1 * 30 is 3, whatever floats say
    if count < MIN_HELD_OUT_TASKS:
        return np.empty(0, np.int64)
    digest = hashlib.blake2b(f"lachesis held out/{seed}/{env}/{size}".encode(), digest_size=16).digest()
    keys = np.random.PCG64(int.from_bytes(digest, "little")).random_raw(size)
    return np.argsort(keys, kind="stable")[:count].astype(np.int64)


def mask_held_out(weights: NDArray[F], held_out: NDArray[np.int64]) -> NDArray[F]:
    """Return `weights` [tasks] with 0 at the held-out tasks.

    Where that leaves no task with a weight, all that are not held out have the same.
    """
    masked = weights.copy()
    masked[held_out] = 0.0
    if not masked.any():
        masked[:] = 1.0
        masked[held_out] = 0.0
    return masked
