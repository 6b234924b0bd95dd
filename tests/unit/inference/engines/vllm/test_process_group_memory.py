"""Shared memory that a group of processes has left is removed, and nothing else's."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from lachesis.pipeline.inference.engines.vllm.process_group_memory import has_processes, remove_names, shared_names

SHARED = Path("/dev/shm")  # noqa: S108 - where shared memory has its names
MAKES = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
print(memory.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def group():
    process = subprocess.Popen(
        [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    yield process, name
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_what_a_killed_group_has_left_is_removed_and_what_others_have_stays(group) -> None:
    process, name = group
    other = SharedMemory(create=True, size=4096)
    try:
        names = shared_names(process.pid)
        assert name in names
        assert any(one.startswith("sem.mp-") for one in names), "the semaphore of its lock"
        assert other.name not in names
        assert has_processes(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        while has_processes(process.pid):
            pass
        assert set(remove_names(names)) == names
        assert remove_names(names) == []
        left = {path.name for path in SHARED.iterdir()}
        assert not names & left
        assert other.name in left
    finally:
        other.close()
        other.unlink()
