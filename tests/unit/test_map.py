"""The map names files that exist, and every folder of the pipeline."""

import re
from pathlib import Path

import pytest

PIPELINE = Path(__file__).parents[2] / "pipeline"
MAP = (PIPELINE / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+/[\w/]+(?:\.py|/)?)`", MAP))))
def test_it_names_what_exists(name: str) -> None:
    assert (PIPELINE / name).exists() or (PIPELINE.parent / name).exists()


def test_each_service_has_a_folder_of_its_name() -> None:
    from lachesis.services.registry import SERVICES

    assert [name for name in SERVICES if not (PIPELINE / name / "stage.py").is_file()] == []
    for spec in SERVICES.values():
        assert spec.stage.startswith(f"{spec.name}.stage:")
