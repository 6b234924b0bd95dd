from pathlib import Path

import pytest
from outside import mark_below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave these tests out of `make unit`: they compute with torch, or start processes."""
    mark_below(Path(__file__).parent, items)
