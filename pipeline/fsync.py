"""Making what was written outlive a power loss."""

import os
from pathlib import Path

__all__ = ["fsync"]


def fsync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk: after a rename, those of its folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
