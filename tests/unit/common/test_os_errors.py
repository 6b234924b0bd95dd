"""Errors of the file system that a user can mend are told from bugs."""

import errno
import os

import pytest

from lachesis.pipeline.common.os_errors import explain_os_error


def test_what_where_and_how_to_mend_it() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/report.html")
    assert explain_os_error(error) == (
        "/runs/a/report.html: No space left on device; make room on that disk, or write to another one"
    )


@pytest.mark.parametrize("error", [OSError("?"), OSError(errno.EBADF, "Bad file descriptor"), ValueError("x")])
def test_what_may_be_a_bug_is_not_explained(error: Exception) -> None:
    assert explain_os_error(error) is None
