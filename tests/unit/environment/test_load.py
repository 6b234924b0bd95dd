"""Environments by name, and errors that name what is wrong."""

import sys
from pathlib import Path

import pytest

from lachesis import Environment, Task
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.schemas.errors import ConfigError

SUMS = f"{Path(__file__).parents[2] / 'examples' / 'sums.py'}:Sums"


def test_loads_a_file_a_module_and_a_builtin() -> None:
    assert len(load_environment(SUMS, {"largest": 4})) == 25
    assert type(load_environment(SUMS)) is type(load_environment(SUMS))
    assert isinstance(load_environment("spell_backward"), SpellBackward)


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("spell_backwards", {}, "did you mean 'spell_backward'"),
        ("nowhere.at_all:Thing", {}, "module 'nowhere.at_all' was not found"),
        ("no/such/file.py:Thing", {}, "there is no file 'no/such/file.py' in "),
        (SUMS.replace("Sums", "Sum"), {}, "did you mean 'Sums'"),
        ("json:loads", {}, "not a subclass"),
        (SUMS, {"larges": 4}, "unknown argument 'larges'; did you mean 'largest'"),
        (SUMS, {"largest": "4"}, "argument 'largest'"),
        (SUMS, {"largest": -1}, "no tasks"),
    ],
)
def test_errors_name_the_fault(name: str, params: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_environment(name, params).task(0)
    assert text in str(caught.value)


def test_an_import_error_inside_a_users_module_is_shown_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import not_installed_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        load_environment(f"{path}:Mine")


class OwnKeys(Environment):
    def __init__(self, keys: object) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return 2

    def task(self, index: int) -> Task:
        return Task(item=str(index), prompt="q")

    def item_keys(self):  # type: ignore[no-untyped-def]
        return sys.exit(3) if self.keys == "exit" else self.keys


@pytest.mark.parametrize("keys", [[1], [1.5, 2.0], ["a", "b"], None])
def test_keys_of_an_environments_own_are_checked(keys: object) -> None:
    with pytest.raises(ConfigError, match=r"OwnKeys.item_keys returns .* for each of the 2 tasks"):
        item_keys_of(OwnKeys(keys))


def test_whole_numbers_are_keys_and_an_end_of_the_process_is_named() -> None:
    assert item_keys_of(OwnKeys([7, 2**64 - 1])).tolist() == [7, 2**64 - 1]
    with pytest.raises(EnvironmentCodeError, match=r"OwnKeys.item_keys ends the process"):
        item_keys_of(OwnKeys("exit"))
