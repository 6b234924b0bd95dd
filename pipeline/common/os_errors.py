"""Explains errors of the file system that are no bug: what failed, where, and how to fix it."""

import errno
import os
import re

__all__ = ["errno_of", "explain_os_error"]

_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[Errno (\d+)\]")
"""How errors that are no `OSError` of their own say which error of the system they are about: those of libraries in
Rust (safetensors, tokenizers), and `shutil.Error`."""

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
    errno.EFBIG: "no larger file may be written there: raise the limit (`ulimit -f`), or choose another file system, "
    "since FAT takes 4 GiB at most",
    errno.EILSEQ: "write it again as text",
}


def explain_os_error(error: BaseException) -> str | None:
    """Return what a user can do about an error of the file system; None: it is none, or may be a bug."""
    number = errno_of(error)
    if number not in _HINTS:
        return None
    if not isinstance(error, OSError):
        return f"{error}; {_HINTS[number]}"
    if number == errno.EFBIG and error.strerror != os.strerror(number):
        return f"{error.filename}: {error.strerror}; name another file"  # read, and larger than such a file may be
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; {_HINTS[number]}"


def errno_of(error: BaseException) -> int | None:
    """Return which error of the system an error is about, None if it says none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1] or found[2]) if found else None
