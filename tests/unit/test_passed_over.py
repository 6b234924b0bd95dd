"""`-m slow` and `make unit` pass over files without a test of theirs, and no test hides in such a file."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from passed_over import HIDDEN, pytest_ignore_collect, pytest_itemcollected

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


def test_no_slow_test_is_in_a_file_that_would_be_passed_over(request: pytest.FixtureRequest) -> None:
    assert request.config.stash.get(HIDDEN, []) == [], "write mark.slow in these files"


@pytest.mark.parametrize(("text", "hidden"), [(SLOW, []), (OVER_A_CLUSTER, []), (FAST, ["test_two.py::test_it"])])
def test_a_slow_test_that_would_be_passed_over_is_noted(tmp_path: Path, text: str, hidden: list[str]) -> None:
    file = tmp_path / "test_two.py"
    file.write_text(text)
    config: Any = SimpleNamespace(stash=pytest.Stash())
    item: Any = SimpleNamespace(
        nodeid="test_two.py::test_it", path=file, config=config, get_closest_marker=lambda name: name
    )
    pytest_itemcollected(item)
    assert config.stash.get(HIDDEN, []) == hidden


OUTSIDE = "import pytest\npytestmark = [pytest.mark.hostile, pytest.mark.outside]\ndef test_it() -> None: ...\n"
IN_PART = "import pytest\n@pytest.mark.outside\ndef test_it() -> None: ...\n"
BELOW = "def pytest_collection_modifyitems(items) -> None:\n    mark_below(Path(__file__).parent, items)\n"
HOSTILE_BELOW = BELOW.replace("items)\n", 'items, "hostile")\n')


@pytest.mark.parametrize(
    ("name", "text", "marks", "ignored"),
    [
        ("test_one.py", OUTSIDE, "not slow and not outside", True),
        ("test_one.py", OUTSIDE, "not slow", None),
        ("test_one.py", IN_PART, "not slow and not outside", None),
        ("conftest.py", BELOW, "not slow and not outside and not extension", True),
        ("conftest.py", BELOW, "not slow", None),
        ("conftest.py", HOSTILE_BELOW, "not slow and not outside", None),
    ],
)
def test_a_file_or_folder_that_is_all_outside_is_passed_over_where_none_of_that_is_wanted(
    tmp_path: Path, name: str, text: str, marks: str, ignored: bool | None
) -> None:
    file = tmp_path / name
    file.write_text(text)
    path = tmp_path if name == "conftest.py" else file
    assert pytest_ignore_collect(path, config(marks)) is ignored


def test_make_unit_imports_no_torch(request: pytest.FixtureRequest) -> None:
    if "not outside" in request.config.option.markexpr:
        assert "torch" not in sys.modules, "mark what imports it with pytestmark = pytest.mark.outside"
