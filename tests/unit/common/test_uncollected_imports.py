"""Imports without the garbage collector, and what fork servers import beforehand."""

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import pytest

from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.services.supervisor.forkserver import USED_LATER


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """What the collector begins, as it does."""
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)
    gc.unfreeze()


def test_nothing_is_collected_while_modules_are_imported_nor_are_they_looked_through_later(
    collections: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with uncollected_imports():
        monkeypatch.setitem(sys.modules, "lachesis.imported_just_now", sys)
        made: list[object] = [[] for _ in range(3 * gc.get_threshold()[0])]  # far more than what sets the collector off
        assert not collections
    assert gc.isenabled()
    assert not any(one is made for one in gc.get_objects()), "a later collection would look through it"


def test_where_nothing_is_left_to_import_nothing_is_exempt(collections: list[str]) -> None:
    before = gc.get_freeze_count()
    with uncollected_imports():
        made: list[object] = [[]]
    assert gc.get_freeze_count() <= before
    assert any(one is made for one in gc.get_objects())


def test_an_error_of_an_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), uncollected_imports():
        import_module("lachesis.there_is_no_such_module")
    assert gc.isenabled()
    gc.unfreeze()


def test_a_block_within_another_does_not_end_its_pause() -> None:
    with uncollected_imports():
        with uncollected_imports():
            pass
        assert not gc.isenabled()
    gc.unfreeze()


@pytest.mark.parametrize("kind", USED_LATER)
def test_a_fork_server_finds_each_module_that_its_children_would_import_later(kind: str) -> None:
    assert all(find_spec(name) is not None for name in USED_LATER[kind])  # one that is not found is passed over there
