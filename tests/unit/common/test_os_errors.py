"""Errors of the file system that a user can mend are no bugs."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.pipeline.common.os_errors import explain_os_error


def test_what_where_and_how_to_mend_it() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/report.html")
    assert explain_os_error(error) == (
        "/runs/a/report.html: No space left on device; make room on that disk, or write to another one"
    )


@pytest.mark.outside
def test_files_that_grow_beyond_a_limit_and_errors_of_libraries_in_rust(tmp_path: Path) -> None:
    code = (
        "import resource, signal, numpy; from safetensors.numpy import save_file;"
        "from lachesis.pipeline.common.os_errors import explain_os_error;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "def write(): open('plain', 'wb', buffering=0).write(b'0' * 1000); open('plain', 'ab', 0).write(b'0')\n"
        "def save(): save_file({'a': numpy.zeros(9999)}, 'tensors')\n"
        "for job in write, save:\n"
        "    try: job()\n"
        "    except Exception as error: print(explain_os_error(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    plain, tensors = done.stdout.splitlines()
    assert plain.startswith("File too large; no larger file may be written there: raise the limit (`ulimit -f`), or")
    assert "File too large (os error 27); no larger file may be written there: raise the limit" in tensors
    read = OSError(errno.EFBIG, "is larger than 5 bytes", "/a/file")
    assert explain_os_error(read) == "/a/file: is larger than 5 bytes; name another file"


@pytest.mark.parametrize("error", [OSError("?"), OSError(errno.EBADF, "Bad file descriptor"), ValueError("x")])
def test_what_may_be_a_bug_is_not_explained(error: Exception) -> None:
    assert explain_os_error(error) is None
