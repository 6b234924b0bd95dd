"""The files that a Python interpreter needs to run in a root of its own: nothing else of the machine is in it."""

import glob
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from lachesis.schemas.errors import StartupError

__all__ = ["InterpreterFiles", "interpreter_files"]

_LIBRARIES_PROBE = """
import contextlib
for name in ("bz2", "ctypes", "decimal", "hashlib", "lzma", "readline", "sqlite3", "zlib"):
    with contextlib.suppress(ImportError):
        __import__(name)
print("".join(line[line.index("/"):] for line in open("/proc/self/maps") if ".so" in line and "/" in line))
"""
_LOADERS = ("/lib*/ld-*", "/etc/ld.so.cache", "/etc/ld-musl-*.path")


@dataclass(frozen=True, slots=True)
class InterpreterFiles:
    """What goes into the root, as absolute paths."""

    python: str
    """The interpreter to start."""
    readable: tuple[str, ...]
    """Files and folders, without symbolic links in their paths."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links: where they lie, and what they say."""
    hidden: tuple[str, ...]
    """Folders within the readable ones that are shown empty."""


def interpreter_files(*, packages: bool) -> InterpreterFiles:
    """Return what the interpreter needs: itself, the standard library, shared libraries, and installed packages if asked.

    Raises `StartupError` if the interpreter cannot tell.
    """
    base = os.path.realpath(sys.executable)
    own = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    standard = {sysconfig.get_path(name, vars=own) for name in ("stdlib", "platstdlib")}
    wanted = {base, *standard, *_library_folders(base), *(path for pattern in _LOADERS for path in glob.glob(pattern))}
    if packages:
        wanted |= {sys.executable, sys.prefix, *(sysconfig.get_path(name) for name in ("purelib", "platlib"))}
    links: dict[str, str] = {}
    resolved = {_resolve(os.path.abspath(path), links) for path in wanted if os.path.exists(path)}
    readable = tuple(sorted(path for path in resolved if not _within(path, resolved - {path})))
    installed = [os.path.join(path, name) for path in standard for name in ("site-packages", "dist-packages")]
    hidden = {os.path.realpath(path) for path in installed if os.path.isdir(path)}
    return InterpreterFiles(
        python=sys.executable if packages else base,
        readable=readable,
        links=tuple(sorted((link, target) for link, target in links.items() if not _within(link, set(readable)))),
        hidden=() if packages else tuple(sorted(path for path in hidden if _within(path, set(readable)))),
    )


def _library_folders(python: str) -> set[str]:
    done = subprocess.run([python, "-I", "-S", "-c", _LIBRARIES_PROBE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StartupError(f"{python} does not tell which shared libraries it needs: {done.stderr.strip()[-300:]}")
    return {str(Path(os.path.realpath(line)).parent) for line in done.stdout.splitlines() if line}


def _resolve(path: str, links: dict[str, str]) -> str:
    """Return the path without symbolic links; note those on the way."""
    reached = "/"
    for part in path.strip("/").split("/"):
        reached = os.path.join(reached, part)
        if os.path.islink(reached):
            links[reached] = os.readlink(reached)
            rest = path[len(reached) :].lstrip("/")
            target = os.path.join(os.path.dirname(reached), links[reached])
            return _resolve(os.path.normpath(os.path.join(target, rest)), links)
    return path


def _within(path: str, folders: set[str]) -> bool:
    return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)
