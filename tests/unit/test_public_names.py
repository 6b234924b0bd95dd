"""The public face: what `lachesis` offers, how it is found, and that finding it costs nothing."""

import subprocess
import sys

import pytest

import lachesis


@pytest.mark.outside
@pytest.mark.extension
def test_every_public_name_is_completed_and_exists():
    names = dir(lachesis)
    assert set(lachesis.__all__) <= set(names)
    assert names == sorted(names)
    assert "__version__" in names
    assert not {"Any", "importlib"} & set(names)
    for name in lachesis.__all__:
        assert getattr(lachesis, name).__name__ == name


@pytest.mark.outside
def test_completion_imports_nothing_heavy():
    code = "import sys, lachesis; before = set(sys.modules); dir(lachesis); print(set(sys.modules) - before)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
