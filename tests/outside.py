"""Fails a test of `make unit` that starts a process or uses a socket.

`make unit` runs the tests of `tests/unit` that are marked neither `outside` nor `slow`.
"""

import multiprocessing.util
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["OutsideError", "mark_below", "pytest_runtest_setup", "pytest_runtest_teardown"]

_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "socket.bind", "socket.connect"}
_LEFT_OUT = ("outside", "slow")
_tried: list[str] | None = None
"""What the test that runs now has tried. None: it may."""
_spawn = multiprocessing.util.spawnv_passfds


class OutsideError(AssertionError):
    """Raised when a unit test starts a process or uses a socket without being marked `outside`."""


def mark_below(folder: Path, items: list[pytest.Item], name: str = "outside") -> None:
    """Mark every test in a folder, by default as one that is no unit test.

    What computes with torch also starts ranks, servers and workers.
    """
    below = f"{folder}{os.sep}"
    for item in items:
        if str(item.path).startswith(below):  # comparing with each of its parents costs 20 times as much
            item.add_marker(name)


def _look(event: str, arguments: tuple[Any, ...]) -> None:
    if _tried is not None and event in _EVENTS:
        _tried.append(f"{event} {str(arguments)[:200]}")
        raise OutsideError(f"a unit test tried {_tried[-1]}; mark it @pytest.mark.outside if it has to")


def _look_and_spawn(path: Any, arguments: Any, passed: Any) -> Any:
    _look("os.posix_spawn", (path, arguments))  # the interpreter reports nothing of this one
    return _spawn(path, arguments, passed)


sys.addaudithook(_look)
multiprocessing.util.spawnv_passfds = _look_and_spawn


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Forbid both from the test's first fixture on."""
    global _tried  # noqa: PLW0603 - an audit hook stays for the life of the process, so what it looks at is global
    _tried = None if any(item.get_closest_marker(name) for name in _LEFT_OUT) else []
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that caught the error and went on."""
    global _tried
    try:
        return (yield)
    finally:
        tried, _tried = _tried, None
        if tried:
            pytest.fail(f"tried outside of a test marked so: {tried[:3]}")
