"""Every test here runs a program in a sandbox."""

from pathlib import Path

import pytest
from outside import mark_below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_below(Path(__file__).parent, items)
    mark_below(Path(__file__).parent, items, "hostile")
