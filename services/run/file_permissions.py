"""Keeps what a command writes private to its user.

Folders, logs and exports, also of the processes that it starts.
"""

import os

__all__ = ["make_files_private", "share_files"]

PRIVATE_UMASK = 0o077
_given: list[int] = []
"""The umask that the command was started with, once it was replaced."""


def make_files_private() -> None:
    """Let only the user read what this process writes from now on."""
    given = os.umask(PRIVATE_UMASK)
    if not _given:
        _given.append(given)


def share_files() -> None:
    """Take up again the umask that the command was started with."""
    if _given:
        os.umask(_given[0])
