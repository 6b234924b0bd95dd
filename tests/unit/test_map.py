"""The map and the folders' READMEs name files that exist, and each service has a folder of its name."""

import re
from pathlib import Path

import pytest

PIPELINE = Path(__file__).parents[2] / "pipeline"
TESTS = PIPELINE.parent / "tests"
MAP = (PIPELINE / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+/[\w/]+(?:\.py|/)?)`", MAP))))
def test_it_names_what_exists(name: str) -> None:
    assert (PIPELINE / name).exists() or (PIPELINE.parent / name).exists()


def test_each_service_has_a_folder_of_its_name() -> None:
    from lachesis.services.registry import services

    for spec in services().values():
        module = spec.stage.partition(":")[0]
        assert module.endswith(f".{spec.name}.stage")
        assert (PIPELINE.parent / f"{module.removeprefix('lachesis.').replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("page", [*PIPELINE.rglob("README.md"), PIPELINE.parent / "schemas" / "README.md"], ids=str)
def test_pages_name_modules_that_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text()))
    known = [*page.parent.rglob("*.py"), *TESTS.rglob("test_*.py")]
    places = [PIPELINE, PIPELINE.parent, TESTS]
    unknown = [name for name in named if not any((place / name).exists() for place in places)]
    assert [name for name in unknown if not any(str(path).endswith(f"/{name}") for path in known)] == []


def test_each_folder_has_tests_in_a_folder_of_its_name() -> None:
    """That of a service also has the tests of its `logic/` and the like; an extension has a folder of its own."""
    root, without = PIPELINE.parent, set()
    for file in [*(root / "pipeline").rglob("*.py"), *(root / "services").rglob("*.py")]:
        inner = file.parent.relative_to(root).parts[1:]
        name = "/".join(inner[:2] if inner[:1] == ("extensions",) else inner[:1])
        if not any(any((TESTS / shelf / name).rglob("test_*.py")) for shelf in ("unit", "integration")):
            without.add(name)
    assert without == set()
