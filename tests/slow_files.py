"""Lets `-m slow` import only the files that hold slow tests, a quarter of all: each worker collects for itself.

A file may hold some if it says `mark.slow`, or if its tests take the bus of `conftest.py`, which is slow over a
cluster. A test of `make test` fails if a slow test is in any other file, so none is left out unseen.
"""

import re
from functools import cache
from pathlib import Path

import pytest

__all__ = ["HIDDEN", "may_hold_slow_tests", "pytest_ignore_collect", "pytest_itemcollected"]

HIDDEN = pytest.StashKey[list[str]]()
"""Slow tests in files that do not say that they hold some, of those that were collected."""

_SLOW = re.compile(r"\bmark\.slow\b|\(bus\b|\bbus: Bus\b")


@cache
def may_hold_slow_tests(file: Path) -> bool:
    """Return whether the file's text says so."""
    return _SLOW.search(file.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over a file without slow tests where only slow ones are wanted."""
    only_slow = config.option.markexpr == "slow"
    if only_slow and collection_path.suffix == ".py" and not may_hold_slow_tests(collection_path):
        return True
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a slow test that `-m slow` would not find."""
    if item.get_closest_marker("slow") is not None and not may_hold_slow_tests(item.path):
        item.config.stash.setdefault(HIDDEN, []).append(item.nodeid)
