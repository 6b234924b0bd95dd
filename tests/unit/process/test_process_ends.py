"""How a process says that the file system ended it, and by which code its supervisor knows."""

import errno
import logging
import os

import pytest

from lachesis.services.process.service_process import EXIT_NO_ROOM, EXIT_STARTUP, _explain


def error(number: int, path: str = "/runs/a/x") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize(
    ("ended_by", "code", "said"),
    [
        (error(errno.ENOSPC), EXIT_NO_ROOM, "'/runs/a/x': make room on that disk"),
        (BaseExceptionGroup("", [error(errno.ENOSPC), error(errno.EDQUOT)]), EXIT_NO_ROOM, "Disk quota exceeded"),
        (error(errno.EACCES), EXIT_STARTUP, f"/runs/a/x: Permission denied; let user {os.geteuid()} read or write it"),
        (error(errno.EROFS), EXIT_STARTUP, "that file system is read-only"),
        (error(errno.EBADF), 1, "ended by an unexpected error"),
        (BaseExceptionGroup("", [error(errno.ENOSPC), ValueError()]), 1, "ended by an unexpected error"),
    ],
)
def test_the_code_says_what_a_restart_can_mend(caplog, ended_by: BaseException, code: int, said: str) -> None:
    caplog.set_level(logging.ERROR)
    assert _explain(ended_by) == code
    assert said in caplog.text
