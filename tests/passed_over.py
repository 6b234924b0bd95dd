"""Spares pytest the import of files that hold no test it wants: each worker collects for itself.

`-m slow` imports only the files that may hold slow tests, a quarter of all: those that say `mark.slow`, and those whose
tests take the bus of `conftest.py`, which is slow over a cluster. A test of `make test` fails if a slow test is in any
other file, so none is left out unseen. `make unit` passes over the files and folders that mark all of their tests
`outside` or `slow`: most of them import torch, which takes longer than all else that is collected.
"""

import re
from functools import cache
from pathlib import Path

import pytest

__all__ = ["HIDDEN", "may_hold_slow_tests", "pytest_ignore_collect", "pytest_itemcollected"]

HIDDEN = pytest.StashKey[list[str]]()
"""Slow tests in files that do not say that they hold some, of those that were collected."""

_SLOW = re.compile(r"\bmark\.slow\b|\(bus\b|\bbus: Bus\b")
_FILE_OUTSIDE = re.compile(r"^pytestmark = .*\bmark\.(outside|slow)\b", re.MULTILINE)
_FOLDER_OUTSIDE = re.compile(r"\bmark_below\(Path\(__file__\)\.parent, items\)")


@cache
def may_hold_slow_tests(file: Path) -> bool:
    """Return whether the file's text says so."""
    return _SLOW.search(file.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over a file without slow tests for `-m slow`, and what is all outside where `not outside` is wanted."""
    wanted = config.option.markexpr
    if wanted == "slow" and collection_path.suffix == ".py" and not may_hold_slow_tests(collection_path):
        return True
    if "not outside" in wanted.split(" and ") and _all_outside(collection_path):
        return True
    return None


def _all_outside(path: Path) -> bool:
    text, marked = (path, _FILE_OUTSIDE) if path.suffix == ".py" else (path / "conftest.py", _FOLDER_OUTSIDE)
    return text.is_file() and marked.search(text.read_text(encoding="utf-8")) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note a slow test that `-m slow` would not find."""
    if item.get_closest_marker("slow") is not None and not may_hold_slow_tests(item.path):
        item.config.stash.setdefault(HIDDEN, []).append(item.nodeid)
