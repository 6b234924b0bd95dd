"""The helpers of the unit tests of stages, around any bus."""

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("stage_lab", Path(__file__).parents[2] / "unit" / "conftest.py")
_lab = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_lab)


@pytest.fixture
def make_lab():
    return _lab.Lab
