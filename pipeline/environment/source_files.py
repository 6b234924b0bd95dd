"""Finds the environments in the Python files of a folder, or in one file, without importing any.

Guarantees that a file that cannot be read or parsed is named and hides no other; that links to folders are not
followed; that hidden folders and virtual environments are left out.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from lachesis.pipeline.common.safe_text import encodable
from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.environment.source_scan import MAX_SOURCE_BYTES, FoundEnvironment, find_environments
from lachesis.schemas.errors import ConfigError

__all__ = ["SourceFile", "scan_files"]

_MAX_FILES = 20_000


class SourceFile(Struct, frozen=True, kw_only=True):
    """A Python file with environments, or one that cannot be read."""

    path: str
    environments: list[FoundEnvironment] = []
    problem: str | None = None
    """Why it could not be read. None: it was."""


def scan_files(place: Path) -> list[SourceFile]:
    """Return the files with environments, and those that cannot be read, in the order of their paths.

    Raises `ConfigError` if the place does not exist, or holds more Python files than it would be sensible to read.
    """
    if not place.exists():
        raise ConfigError(f"{place} does not exist")
    found = []
    for number, path in enumerate(_python_files(place) if place.is_dir() else [place]):
        if number >= _MAX_FILES:
            raise ConfigError(f"{place} holds more than {_MAX_FILES} Python files; name a folder inside it")
        file = _scan(path)
        if file.environments or file.problem:
            found.append(file)
    return found


def _python_files(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not _is_venv(Path(where, name)))
        yield from (Path(where, name) for name in sorted(files) if name.endswith(".py"))


def _is_venv(folder: Path) -> bool:
    return os.path.lexists(folder / "pyvenv.cfg")


def _scan(path: Path) -> SourceFile:
    shown = encodable(str(path))
    try:
        with open_regular_file(path) as file:
            source = file.read(MAX_SOURCE_BYTES + 1)
        return SourceFile(path=shown, environments=find_environments(source))
    except OSError as error:
        return SourceFile(path=shown, problem=f"cannot be read: {error.strerror}")
    except ConfigError as error:
        return SourceFile(path=shown, problem=str(error))
