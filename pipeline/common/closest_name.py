"""Says after an unknown name which known one is nearest, or which names are known."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return the end of an error about an unknown `name`: the nearest known one, or all of them.

    `prefix` is shown before the nearest.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; known: {', '.join(names)}" if names else "; none are known"
