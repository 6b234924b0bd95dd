"""Reads small files whole; refuses irregular, large and binary files, so that no read hangs.

A named pipe, a device or a disk image in the place of a token or a configuration would keep its reader for ever, or
take all memory. What is refused is an `OSError`, as for a file that is not there.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from lachesis.pipeline.common.text_encoding import read_text

__all__ = ["MAX_SMALL_FILE_BYTES", "open_regular_file", "read_small_file", "read_small_text"]

MAX_SMALL_FILE_BYTES = 64 << 20
"""No file that people or services write for such a reader comes near it."""


def open_regular_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises `OSError` whose `strerror` says why that cannot be."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer does not block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.ENODEV, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_small_file(path: Path) -> bytes:
    """Return the content of the file. Raises as `open_regular_file`, also where the file is too large."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MAX_SMALL_FILE_BYTES:
            data = file.read(size + 1)  # `read` allocates the whole size at once; the file may have grown meanwhile
            size = len(data)
    if size > MAX_SMALL_FILE_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {MAX_SMALL_FILE_BYTES} bytes", str(path))
    return data


def read_small_text(path: Path) -> str:
    """Return the text in the file, without a mark of its encoding.

    Raises as `read_small_file`, also where the file holds no UTF-8, and no UTF-16 with its mark.
    """
    try:
        return read_text(read_small_file(path))
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, "holds no UTF-8 text", str(path)) from error
