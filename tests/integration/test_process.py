"""The life of a service's process where something is missing from its beginning."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.services.process.service_process import EXIT_DRAINED


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_what_waits_for_a_server_ends_with_its_supervisor(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nats", f"nats://127.0.0.1:{port}", "--set", f"folder={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lachesis", "run", "governor", *where, "--supervised"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, told = process.communicate()  # which ends its standard input
    assert b"the supervisor is gone" in told
    assert process.returncode == EXIT_DRAINED
