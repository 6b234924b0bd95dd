"""Making what was written outlive a power loss."""

import os
from pathlib import Path

__all__ = ["fsync", "make_folder", "sync_tree"]


def fsync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk.

    After a rename, those of its folder.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder is on disk with all that it holds. A rename that publishes it comes after this."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, whose names outlive a power loss."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync(folder.parent)
