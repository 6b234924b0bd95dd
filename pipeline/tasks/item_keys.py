"""Makes the 64-bit keys by which tasks are recognized in another order of their pool. Pure.

Statistics, the order of an epoch and the held-out split use these keys, so every task keeps its identity if a file is
shuffled, extended or exchanged between two starts of a run.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.tasks.task import Task, prompt_text

__all__ = [
    "Keys",
    "content_key",
    "exact_key",
    "keys_of",
    "mixed",
    "one_spelling",
    "places_of",
    "prompt_key",
    "unique_keys",
]

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe00-\ufe0f\ufeff]")
"""Hyphens that are not shown, spaces without width, marks of direction, variants of a character."""
Keys = NDArray[np.uint64]
"""One key for each task, by its index."""


def keys_of(tasks: Iterable[Task]) -> Keys:
    """Return the keys of an environment's tasks, made from their prompts.

    Tasks with exactly the same prompt, such as games with a hidden state, are distinguished by the data for raters.
    """
    loose, exact, full = [], [], []
    for task in tasks:
        text = prompt_text(task.messages)
        loose.append(prompt_key(text))
        exact.append(exact_key(text))
        full.append(exact_key(_packed([text, task.item, task.task])))
    keys = np.array(loose, np.uint64)
    same = _repeats(np.array(exact, np.uint64))
    keys[same] = np.array(full, np.uint64)[same]
    return keys


def content_key(task: Task) -> int:
    """Return a key that is the same for tasks with the same prompt, skill and data for raters.

    Their names do not matter. The spelling of the prompt does not matter, as in `prompt_key`.
    """
    return exact_key(_packed([one_spelling(prompt_text(task.messages)), task.skill, task.task]))


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, order="deterministic", enc_hook=str)
    except (TypeError, ValueError, OverflowError):
        return repr(value).encode("utf-8", "surrogatepass")


def exact_key(data: str | bytes) -> int:
    """Return the key of a text or of bytes, unchanged."""
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def one_spelling(text: str) -> str:
    """Return a text without what people do not see: blanks, case, other codes of a character."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(_INVISIBLE.sub("", folded).split())


def prompt_key(text: str) -> int:
    """Return the key of a text, the same for all texts of `one_spelling`."""
    return exact_key(one_spelling(text))


def mixed(keys: Keys) -> Keys:
    """Return splitmix64 of every key: a bijection of 64-bit numbers (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        z = keys + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Keys = z ^ (z >> np.uint64(31))
    return found


def unique_keys(keys: Keys, names: Keys) -> Keys:
    """Return the keys; equal ones are made different by the keys of their names, then by their order."""
    found = keys.copy()
    same = _repeats(found)
    found[same] = mixed(found[same] ^ names[same])
    seen: dict[int, int] = {}
    for index in np.flatnonzero(_repeats(found)).tolist():
        key = int(found[index])
        seen[key] = seen.get(key, -1) + 1
        found[index] = (key + seen[key]) % (1 << 64)
    return found


def places_of(wanted: Keys, among: Keys) -> NDArray[np.int64]:
    """Return the index in `among` of each of `wanted`, int64 [N]; -1 if it is not there."""
    order = np.argsort(among, kind="stable")
    found = np.minimum(np.searchsorted(among[order], wanted), len(among) - 1)
    places = order[found].astype(np.int64)
    places[among[places] != wanted] = -1
    return places


def _repeats(keys: Keys) -> NDArray[np.bool_]:
    """Return which keys, bool [N], occur more than once."""
    _, place, counts = np.unique(keys, return_inverse=True, return_counts=True)
    found: NDArray[np.bool_] = counts[place] > 1
    return found
