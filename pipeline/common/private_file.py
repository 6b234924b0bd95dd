"""Files that their owner alone can read: secrets that processes of one run share through its folder."""

import os
import secrets
from pathlib import Path

from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.errors import StartupError

__all__ = ["given_token", "shared_token", "write_private"]


def given_token(path: Path, setting: str) -> str:
    """Return the token in a file that `setting` names.

    Raises `StartupError` when it cannot be read, or holds none that a header can bear.
    """
    try:
        return _checked(path, read_small_text(path).strip())
    except (OSError, StartupError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise StartupError(f"{setting} {reason}") from error


def shared_token(path: Path) -> str:
    """Return the token that a file holds, created if there is none: the first caller creates it.

    Raises `StartupError` when it can be neither read nor written, or holds none that a header can bear.
    """
    try:
        if not path.exists():
            _create(path, secrets.token_urlsafe(32))
        return _checked(path, read_small_text(path).strip())
    except OSError as error:
        raise StartupError(f"{path} cannot be read or written: {error.strerror}") from error
    except StartupError as error:
        raise StartupError(f"{error}; remove it, and a token is made") from error


def _checked(path: Path, token: str) -> str:
    if not token:
        raise StartupError(f"{path} is empty: it would let everybody in")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise StartupError(f"{path} must hold one word of ASCII characters")
    return token


def write_private(path: Path, text: str) -> None:
    """Write a line to a file that its owner alone can read, whole or not at all. Raises `StartupError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{text}\n".encode(), private=True)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}") from error


def _create(path: Path, text: str) -> None:
    """Write a private file where there is none: of several callers the first one's counts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    replace_file(partial, f"{text}\n".encode(), private=True)
    try:
        os.link(partial, path)
    except FileExistsError:
        pass  # another was first: its token counts
    finally:
        partial.unlink(missing_ok=True)
