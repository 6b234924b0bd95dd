"""`-m slow` imports the files with slow tests alone, and no slow test hides in another one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from slow_files import pytest_ignore_collect, pytest_itemcollected

SLOW = "import pytest\n@pytest.mark.slow\ndef test_it() -> None: ...\n"
OVER_A_CLUSTER = "async def test_it(bus: Bus) -> None: ...\n"
FAST = "def test_it(nats_bus) -> None: ...\n"


def config(marks: str) -> Any:
    return SimpleNamespace(option=SimpleNamespace(markexpr=marks))


@pytest.mark.parametrize(
    ("text", "marks", "ignored"),
    [(SLOW, "slow", None), (OVER_A_CLUSTER, "slow", None), (FAST, "slow", True), (FAST, "not slow", None)],
)
def test_a_file_without_slow_tests_is_passed_over_where_only_those_are_wanted(
    tmp_path: Path, text: str, marks: str, ignored: bool | None
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(text)
    assert pytest_ignore_collect(file, config(marks)) is ignored


@pytest.mark.parametrize("text", [SLOW, OVER_A_CLUSTER, FAST])
def test_a_slow_test_that_would_be_passed_over_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(text)
    item: Any = SimpleNamespace(nodeid="test_two.py::test_it", path=file, get_closest_marker=lambda name: name)
    if text == FAST:
        with pytest.raises(pytest.UsageError, match=r"test_two\.py::test_it is slow"):
            pytest_itemcollected(item)
    else:
        pytest_itemcollected(item)
