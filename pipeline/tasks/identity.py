"""Computes the keys of an environment's tasks from their prompts. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from lachesis.pipeline.tasks.item_keys import Keys, exact_key, prompt_key, repeats
from lachesis.pipeline.tasks.task import Task

__all__ = ["keys_of"]


def keys_of(tasks: Iterable[Task]) -> Keys:
    """Return the keys of an environment's tasks.

    Tasks with exactly the same prompt, such as games with a hidden state, are distinguished by the data for raters.
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


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value, order="deterministic", enc_hook=str)
    except (TypeError, ValueError, OverflowError):
        return repr(value).encode("utf-8", "surrogatepass")
