"""A process without file descriptors says so, whatever fails for lack of them."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lachesis.services.process.open_files import describe_open_files


@pytest.fixture
def limit() -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    new = max(int(one.name) for one in Path("/proc/self/fd").iterdir()) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, before[1]))
    yield new
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_runs_out_of_file_descriptors_says_so(limit: int) -> None:
    assert describe_open_files() is None or limit < 500, "so few are many of so low a limit"
    opened: list[int] = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        assert describe_open_files() == (f"can open no more files: its process has as many open as it may, {limit}")
        os.close(opened.pop())
        said = describe_open_files()
        assert said is not None
        assert said.startswith("has ")
        assert said.endswith(f" files open, of {limit} that its process may have")
    finally:
        for descriptor in opened:
            os.close(descriptor)
