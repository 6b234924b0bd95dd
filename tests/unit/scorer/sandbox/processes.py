"""Finds what is alive of a program in the sandbox, from outside: every process that has the program as its root's."""

from contextlib import suppress
from pathlib import Path

__all__ = ["alive", "marked"]


def marked(code: str, mark: str) -> bytes:
    """Return a program that `alive` finds."""
    return f"# {mark}\n{code}\n".encode()


def alive(mark: str) -> list[int]:
    """Return the ids of processes in whose root the marked program lies, however they are called by now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "root/program.py").read_bytes()[:200]:
                found.append(int(folder.name))
    return found
