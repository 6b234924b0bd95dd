"""A disk that loses power: what a program has not synced is gone, as far as a file system may lose it.

`Disk` watches a program's fsyncs and renames, and after each of them builds, in another folder, what a power loss at
that moment may leave. A file's content counts as stored once it was synced, as it was then; so do a folder's names.
What a file system may have stored by itself is tried as well: names without their content, as ext4 and XFS may have
them (`names="all"`), or only the names that were synced (`names="synced"`).
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

__all__ = ["Disk"]

Names = Literal["synced", "all"]


class Disk:
    """The disk under `root`. Within `watching`, `after_each` is called with what a power loss may leave, and its cause.

    `skip` makes an fsync of a path that it holds true for a mistake of the program: it does nothing.
    """

    def __init__(self, root: Path, copy: Path, skip: Callable[[Path], bool] = lambda _: False) -> None:
        self.events: list[tuple[str, str]] = []
        """What was done, in order: ("fsync" or "rename", path below root; of a rename its target)."""
        self._root = root
        self._copy = copy
        self._skip = skip
        self._contents: dict[int, bytes] = {}  # by inode, as it was synced last
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # inode by name, and whether it is a folder
        self._held: dict[int, int] = {}  # open files, so that no inode is used again for another one

    @contextmanager
    def watching(self, after_each: Callable[[Path, str], None] | None = None) -> Iterator[None]:
        real_fsync, real_rename, real_replace = os.fsync, os.rename, os.replace

        def done(what: str, path: Path) -> None:
            self.events.append((what, path.relative_to(self._root).as_posix()))
            if after_each is not None:
                for names in ("synced", "all"):
                    after_each(self.after_power_loss(names), f"{self.events[-1]}, names {names}")

        def fsync(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if not path.is_relative_to(self._root) or self._skip(path):
                return
            real_fsync(descriptor)
            self._store(path)
            done("fsync", path)

        def moved(real: Callable[..., None]) -> Callable[..., None]:
            def move(source: str | Path, target: str | Path) -> None:
                real(source, target)
                if Path(target).is_relative_to(self._root):
                    done("rename", Path(target))

            return move

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(os, "rename", moved(real_rename))
            patch.setattr(os, "replace", moved(real_replace))
            yield

    def close(self) -> None:
        """Let go of the files that it watched."""
        while self._held:
            os.close(self._held.popitem()[1])

    def after_power_loss(self, names: Names) -> Path:
        """Return a folder with what a power loss now may leave of `root`."""
        shutil.rmtree(self._copy, ignore_errors=True)
        present = {path.stat().st_ino: path for path in [self._root, *self._root.rglob("*")]}
        self._restore(self._root.stat().st_ino, True, self._copy, present if names == "all" else None)
        return self._copy

    def _store(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        if path.is_dir():
            self._names[inode] = _entries(path)
        else:
            self._contents[inode] = path.read_bytes()

    def _restore(self, inode: int, is_folder: bool, to: Path, present: dict[int, Path] | None) -> None:
        if not is_folder:
            to.write_bytes(self._contents.get(inode, b""))
            return
        to.mkdir()
        names = self._names.get(inode, {}) if present is None else _entries(present[inode])
        for name, (child, is_child_folder) in names.items():
            self._restore(child, is_child_folder, to / name, present)


def _entries(folder: Path) -> dict[str, tuple[int, bool]]:
    return {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(folder)}
