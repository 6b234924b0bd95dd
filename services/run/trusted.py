"""Checks whether a folder may be used: no other user may have written what is in it.

The configuration in a folder names code, so a folder that another user made in the current one would run that user's
code as this user, who may be root. So would a module in the current folder, which could even take the place of one that
is installed. Guarantees that a folder is used only if it, its configuration and what Python would
import from it belong to this user or to root and no other user can write them. The way out is a list of folders that
the user trusts whatever their owner: containers and network file systems may show one's own folder as another's.
"""

import importlib.machinery
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from lachesis.pipeline.common.small_files import read_small_text
from lachesis.schemas.errors import ConfigError
from lachesis.services.run.file_names import EFFECTIVE_FILE, RUN_FILE

__all__ = ["check_trusted", "describe_foreign_modules", "is_trusted", "trusted_folders_file"]

_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_MAX_DEPTH = 8
"""Of packages in packages; links may lead round."""


def check_trusted(folder: Path) -> None:
    """Raise `ConfigError` with the way out where somebody else may have written what is in a run's folder."""
    found = next(_doubts(folder), None)
    if found is None or _is_listed(folder):
        return
    path, why = found
    file = trusted_folders_file(os.environ)
    listed = "" if file is None else f"; if you trust it as it is, add the line {folder.absolute()} to {file}"
    raise ConfigError(
        f"{path} {why}, and what lies in a run's folder is run as {_name(os.geteuid())}: it is not used. If it is "
        f"yours, `chown -R {_name(os.geteuid())} {path}` and `chmod -R go-w {path}`; if it is another user's, let that "
        f"user run the command, or name a folder of your own (--set folder=FOLDER){listed}"
    )


def is_trusted(folder: Path) -> bool:
    """Whether `check_trusted` passes."""
    return next(_doubts(folder), None) is None or _is_listed(folder)


def describe_foreign_modules(folder: Path) -> str | None:
    """Return why modules in a folder may not be imported, and the way out.

    None: they may, or there are none.
    """
    if is_trusted(folder) or next(_importable(folder), None) is None:
        return None
    path, why = next(_doubts(folder))
    file = trusted_folders_file(os.environ)
    listed = "" if file is None else f"; if you trust them as they are, add the line {folder.absolute()} to {file}"
    return (
        f"modules in the current folder are not used, since {path} {why}. If it is yours, "
        f"`chown -R {_name(os.geteuid())} {path}` and `chmod -R go-w {path}`{listed}"
    )


def trusted_folders_file(environ: Mapping[str, str]) -> Path | None:
    """Return the file that lists folders this user trusts whatever their owner; None without a home."""
    home = environ.get("XDG_CONFIG_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.config")
    return Path(home) / "lachesis" / "trusted_folders" if home else None


def _doubts(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield what others may have written, and why."""
    for path in (folder.absolute().parent, folder, folder / RUN_FILE, folder / EFFECTIVE_FILE, *_importable(folder)):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            yield path, f"cannot be looked at ({error.strerror})"
            continue
        why = _doubt(found, sticky_is_enough=path == folder.absolute().parent)
        if why is not None:
            yield path, why


def _doubt(found: os.stat_result, *, sticky_is_enough: bool) -> str | None:
    if found.st_uid not in _own_users():
        return f"belongs to the user {_name(found.st_uid)}"
    if sticky_is_enough and found.st_mode & stat.S_ISVTX:  # no user can replace another's file
        return None
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and found.st_gid != found.st_uid:  # else a user's own group, by convention
        return f"can be written by the group {found.st_gid}"
    return None


def _own_users() -> set[int]:
    """Return root, this user, and who became root by sudo."""
    users = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        users.add(int(os.environ["SUDO_UID"]))
    return users


def _importable(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield what Python would import from a folder: sources, compiled files, packages and what is in those."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for path in entries:
        if path.name.endswith(_SUFFIXES):
            yield path
        elif depth < _MAX_DEPTH and _is_package(path):
            yield path
            yield from _importable(path, depth + 1)


def _is_package(path: Path) -> bool:
    if path.name == "__pycache__":
        return True
    try:
        return path.is_dir() and any(name.endswith(_SUFFIXES) for name in os.listdir(path))  # noqa: PTH208 - only names
    except OSError:
        return False


def _is_listed(folder: Path) -> bool:
    file = trusted_folders_file(os.environ)
    try:
        if file is None or _doubt(file.stat(), sticky_is_enough=False) is not None:
            return False
        listed = [Path(line.strip()) for line in read_small_text(file).splitlines() if line.strip().startswith("/")]
        return any(folder.resolve().is_relative_to(one.resolve()) for one in listed)
    except OSError:
        return False


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
