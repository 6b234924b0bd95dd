"""A real file system that is small: tests fill it, and make room again."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lachesis.pipeline.common.disk import is_disk_full


class SmallDisk:
    """A tmpfs mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self, *, leave: int = 0) -> None:
        """Take all room but `leave` bytes."""
        descriptor = os.open(self._ballast, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for size in (1 << 16, 512):
                try:
                    while self.free_bytes() > leave:
                        os.write(descriptor, bytes(size))
                except OSError as error:
                    if not is_disk_full(error):
                        raise
        finally:
            os.close(descriptor)

    def free(self) -> None:
        """Make room."""
        self._ballast.unlink()

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., SmallDisk]]:
    """Yield what makes a disk of so many MiB."""
    mounted: list[Path] = []

    def make(mebibytes: int, *options: str) -> SmallDisk:
        path = tmp_path / f"disk-{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={mebibytes}m", *options]), "none", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no file system can be mounted here ({error}), so none can be filled")
        mounted.append(path)
        return SmallDisk(path)

    try:
        yield make
    finally:
        for path in mounted:
            with suppress(OSError):
                subprocess.run(["umount", "-l", str(path)], check=False)
