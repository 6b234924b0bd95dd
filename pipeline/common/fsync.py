"""Syncs written files to the disk, so that they survive a power loss."""

import os
from pathlib import Path

__all__ = ["fsync", "make_folder", "partial_of", "replace_file", "sync_tree"]


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


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Put `data` in the place of a file. Raises `OSError`, and then leaves all as it was.

    `private`: its owner alone can read it, at every moment.

    A crash leaves the file as it was, or as it shall be, and beside it at most `partial_of` it.
    """
    partial = partial_of(path)
    partial.unlink(missing_ok=True)  # of a crash, perhaps readable by others
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        _move(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _move(partial: Path, path: Path) -> None:
    try:
        partial.replace(path)
    except FileNotFoundError:  # another writer of the same file has moved it, or is about to move its own
        if not path.exists():
            raise


def partial_of(path: Path) -> Path:
    """Return where `replace_file` writes what is to take the place of `path`."""
    return path.with_name(f".{path.name}.partial")
