"""Lists the files that a Python interpreter needs to run in a root of its own.

No other file of the machine is in that root.
"""

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lachesis.pipeline.errors import StartupError

__all__ = ["InterpreterFiles", "interpreter_files"]

_LIBRARIES_PROBE = """
import contextlib
for name in ("bz2", "ctypes", "decimal", "hashlib", "lzma", "readline", "sqlite3", "zlib"):
    with contextlib.suppress(ImportError):
        __import__(name)
print("".join(line[line.index("/"):] for line in open("/proc/self/maps") if ".so" in line and "/" in line))
"""
_PACKAGES = ("site-packages", "dist-packages")
_LOADERS = ("lib*/ld-*", "etc/ld.so.cache", "etc/ld-musl-*.path")


@dataclass(frozen=True, slots=True)
class InterpreterFiles:
    """The files of the root, as absolute paths."""

    python: str
    """The interpreter to start."""
    readable: tuple[str, ...]
    """Files and folders, without symbolic links in their paths."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: where they lie, and what they say."""
    hidden: tuple[str, ...]
    """Folders within the readable ones that are shown empty."""


def interpreter_files(*, packages: bool) -> InterpreterFiles:
    """Return what the interpreter needs: itself, standard library and shared libraries.

    Installed packages are included if requested.

    Raises `StartupError` if the interpreter cannot name them.
    """
    base = Path(sys.executable).resolve()
    own = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    standard = {Path(sysconfig.get_path(name, vars=own)) for name in ("stdlib", "platstdlib")}
    loaders = {path for pattern in _LOADERS for path in Path("/").glob(pattern)}
    wanted = {base, *standard, *loaders, *_library_folders(base)}
    if packages:
        wanted |= {Path(folder) for folder in (sys.executable, sys.prefix, *_package_folders())}
    links: dict[Path, str] = {}
    found = {_resolve(path, links) for path in wanted if path.exists()}
    readable = {path for path in found if not _is_within(path, found)}
    packaged = {folder / name for folder in standard for name in _PACKAGES}
    hidden = {path.resolve() for path in packaged if path.is_dir()} if not packages else set()
    return InterpreterFiles(
        python=sys.executable if packages else str(base),
        readable=tuple(sorted(map(str, readable))),
        links=tuple(sorted((str(link), target) for link, target in links.items() if not _is_within(link, readable))),
        hidden=tuple(sorted(str(path) for path in hidden if _is_within(path, readable))),
    )


def _package_folders() -> list[str]:
    """Return the folders of installed packages that the program's interpreter looks in, also those of another
    environment that this one builds upon; not folders of source code, which may hold the answers.
    """
    probe = [sys.executable, "-I", "-c", "import sys; print(*sys.path, sep='\\n')"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartupError(f"{sys.executable} does not tell where its packages are: {done.stderr.strip()[-300:]}")
    return [line for line in done.stdout.splitlines() if Path(line).name in _PACKAGES]


def _library_folders(python: Path) -> set[Path]:
    done = subprocess.run([python, "-I", "-S", "-c", _LIBRARIES_PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartupError(f"{python} does not tell which shared libraries it needs: {done.stderr.strip()[-300:]}")
    return {Path(line).resolve().parent for line in done.stdout.splitlines() if line}


def _resolve(path: Path, links: dict[Path, str]) -> Path:
    """Return the path without symbolic links; note those on the way."""
    for part in [*reversed(path.parents), path]:
        if part.is_symlink():
            links[part] = str(part.readlink())
            return _resolve(Path(os.path.normpath(part.parent / links[part] / path.relative_to(part))), links)
    return path


def _is_within(path: Path, folders: set[Path]) -> bool:
    return not folders.isdisjoint(path.parents)
