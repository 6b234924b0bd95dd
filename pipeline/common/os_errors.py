"""Explains errors of the file system that are no bug: what failed, where, and how to fix it."""

import errno
import os

__all__ = ["explain_os_error"]

_OTHER_PLACE_HINT = "choose another place"
_HINTS = {
    errno.ENOSPC: "make room on that disk, or write to another one",
    errno.EDQUOT: "raise the quota, make room, or write to another disk",
    errno.EROFS: "that file system is read-only: write to another one",
    errno.EACCES: f"let user {os.geteuid()} read or write it, or {_OTHER_PLACE_HINT}",
    errno.EPERM: f"let user {os.geteuid()} read or write it, or {_OTHER_PLACE_HINT}",
    errno.ENOTDIR: f"a part of that path is a file: {_OTHER_PLACE_HINT}",
    errno.EISDIR: "name a file in that folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "that link leads back to itself: put a file in its place",
    errno.ENODEV: "put a regular file in its place",
    errno.EFBIG: "name another file",
    errno.EILSEQ: "write it again as text",
}


def explain_os_error(error: BaseException) -> str | None:
    """Return what a user can do about an error of the file system; None: it is none, or may be a bug."""
    if not isinstance(error, OSError) or error.errno not in _HINTS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {_HINTS[error.errno]}"
