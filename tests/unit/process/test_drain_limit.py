"""A process that has to drain ends, whatever blocks its event loop or its threads."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lachesis.services.process.service_process import EXIT_DRAIN_TIMEOUT

pytestmark = pytest.mark.timeout(60)

_SERVICE = """
import logging, sys, time, anyio, signal, threading
from lachesis.services.process.drain_limit import limited_drain

logging.basicConfig()

def block(seconds):
    time.sleep(seconds)

async def run(how):
    with anyio.open_signal_receiver(signal.SIGTERM) as signals, limited_drain(0.2, 4, supervised=how == "orphan"):
        print("ready", flush=True)
        if how in {"loop", "orphan"}:
            block(600)
        if how == "thread":
            await anyio.to_thread.run_sync(block, 600)
        async for number in signals:
            if how == "left":
                threading.Thread(target=block, args=(600,)).start()
            return

anyio.run(run, sys.argv[1])
"""


def start(how: str, folder: Path) -> "subprocess.Popen[bytes]":
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVICE, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.outside
@pytest.mark.parametrize("how", ["loop", "thread", "left", "orphan"])
def test_what_cannot_be_stopped_is_killed_and_says_where_it_stands(tmp_path: Path, how: str) -> None:
    with start(how, tmp_path) as process:
        if how == "orphan":
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait() == EXIT_DRAIN_TIMEOUT
    said = (tmp_path / "said").read_text()
    assert "it had not ended after 0.2 s of draining" in said
    assert "in block" in said


@pytest.mark.outside
def test_what_drains_ends_by_itself(tmp_path: Path) -> None:
    with start("", tmp_path) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
