"""A process's exit code is known to be its own if it has noted it."""

import socket
import subprocess
import sys

import pytest

from lachesis.pipeline.runtime.exit_note import read_exit_note

NOTE = "from lachesis.pipeline.runtime.exit_note import *; is_supervised_by_socket(); "


@pytest.mark.outside
@pytest.mark.parametrize(
    ("code", "noted"),
    [
        (f"{NOTE}note_exit(8)", 8),
        ("import os; os._exit(8)", None),
        (f"{NOTE}import os; pid = os.fork(); pid and os.waitpid(pid, 0); pid or note_exit(8)", None),
    ],
    ids=["noted", "not noted", "by a child of its"],
)
def test_a_code_is_noted_by_the_process_itself(code: str, noted: int | None) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs)
        process.wait(60)
        assert read_exit_note(ours.fileno(), process.pid) == noted
