"""Knows a task again by what it asks: a key of 64 bits that neither order nor blanks change. Pure.

Statistics, the order of an epoch and the held-out split go by these keys, so a file that is shuffled, grown or
exchanged between two starts of a run leaves every task what it was.
"""

import hashlib
import unicodedata
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.tasks.task import Task

__all__ = ["Keys", "exact_key", "keys_of", "prompt_key", "repeats"]

Keys = NDArray[np.uint64]
"""One a task, by its index."""


def exact_key(data: str | bytes) -> int:
    """Return the key of a text or of bytes as they are."""
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def prompt_key(text: str) -> int:
    """Return the key of a text, whatever its blanks and the spelling of its accents."""
    return exact_key(" ".join(unicodedata.normalize("NFC", text).split()))


def keys_of(tasks: Iterable[Task]) -> Keys:
    """Return the keys of an environment's tasks.

    Where several have one prompt to the letter, as games have whose state is hidden, what raters get tells them apart.
    """
    loose, exact, full = [], [], []
    for task in tasks:
        text = "\n".join(f"{one.role}: {one.content}" for one in task.messages)
        loose.append(prompt_key(text))
        exact.append(exact_key(text))
        full.append(exact_key(_packed([text, task.item, task.task])))
    keys = np.array(loose, np.uint64)
    same = repeats(np.array(exact, np.uint64))
    keys[same] = np.array(full, np.uint64)[same]
    return keys


def repeats(keys: Keys) -> NDArray[np.bool_]:
    """Return which keys, bool [N], are not the only one of their value."""
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    found: NDArray[np.bool_] = counts[place] > 1
    return found


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, order="deterministic", enc_hook=str)
    except (TypeError, ValueError, OverflowError):
        return repr(value).encode("utf-8", "surrogatepass")
