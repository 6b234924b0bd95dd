"""Ends what a failed test left running, so that it neither disturbs the tests after it nor the end of pytest.

A test that passes has to end what it started by itself: else Python warns of it, and the test fails by that.
"""

import subprocess
import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest

__all__ = ["pytest_runtest_call", "pytest_runtest_teardown"]

_started: list["weakref.ref[subprocess.Popen[Any]]"] = []
"""What the body of the test that runs now has started, also by way of asyncio. Fixtures end their own."""
_FAILED = pytest.StashKey[bool]()
_start = subprocess.Popen.__init__


def _start_and_note(process: "subprocess.Popen[Any]", *arguments: Any, **options: Any) -> None:
    _start(process, *arguments, **options)
    _started.append(weakref.ref(process))


subprocess.Popen.__init__ = _start_and_note  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Note whether the test fails."""
    _started.clear()
    try:
        return (yield)
    except BaseException:
        item.stash[_FAILED] = True
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """End what is left once the test's fixtures have ended."""
    try:
        return (yield)
    finally:
        for process in filter(None, [made() for made in _started] if item.stash.get(_FAILED, False) else []):
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                with suppress(OSError):  # what was not written yet has no reader any more
                    pipe.close()
