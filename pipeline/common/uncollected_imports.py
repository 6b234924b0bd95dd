"""Imports modules without Python's garbage collector looking through them.

A process with torch imports half a million objects, and they live as long as it does. The collector would look through
all of them several times while they are imported, a quarter of that time, and again whenever it later collects all.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected_imports"]


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Pause the collector while the body imports, and exempt what is there at its end from collections.

    Nothing is exempt where the body had nothing left to import: only garbage would be. Nothing happens where
    the collector is off already, as it is within another such block.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()
