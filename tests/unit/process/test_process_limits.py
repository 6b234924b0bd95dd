"""A process without file descriptors, threads or memory says so, whatever fails for lack of them."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.services.process.process_limits import has_all_files_open, reached_limits


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    new = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, before[1]))
    yield new
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _said_of(topic: str) -> str | None:
    return next((one.text for one in reached_limits() if one.topic == topic), None)


def test_a_process_that_runs_out_of_file_descriptors_says_so(limit: int) -> None:
    assert _said_of("open files") is None or limit < 500, "so few are many of so low a limit"
    opened: list[int] = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        assert _said_of("open files") == f"can open no more files: its process has as many open as it may, {limit}"
        os.close(opened.pop())
        said = _said_of("open files")
        assert said is not None
        assert said.startswith("has ")
        assert said.endswith(f" files open, of {limit} that its process may have")
    finally:
        for descriptor in opened:
            os.close(descriptor)


_LIMITED = """
import os, resource, sys, time
from pathlib import Path
from lachesis.services.process.process_limits import has_all_files_open, reached_limits
assert list(reached_limits()) == []
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.001)  # the thread that was started above still gives memory back
if sys.argv[1] == "memory":
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (32 << 20), resource.RLIM_INFINITY))
else:
    resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    if os.getuid() == 0:
        os.setresuid(12345, 12345, 12345)
print([(one.topic, one.text) for one in reached_limits()])
"""


@pytest.mark.outside
@pytest.mark.parametrize(
    ("limited", "said"),
    [
        ("memory", "bytes of address space that it may have"),
        ("threads", "can start no more threads or processes: its user or its container has as many as it may, 1 by"),
    ],
)
def test_a_process_at_a_limit_names_that_limit(limited: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, limited], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"[('{limited}', "), done.stdout
    assert said in done.stdout


@pytest.mark.outside
def test_that_another_process_can_open_no_more_files_is_seen_from_outside() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        try:
            assert not has_all_files_open(other.pid)
            resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (3, 100))
            assert has_all_files_open(other.pid)
        finally:
            other.kill()
    assert not has_all_files_open(other.pid)
