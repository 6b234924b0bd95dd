"""Tests on a machine with a GPU: which of them see it. The GPU is a stand-in: torch says that there is one."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PLUGIN = """
import torch, hidden_gpu
from pathlib import Path
hidden_gpu._DRIVER = Path("/")
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
"""
CONFTEST = "from hidden_gpu import hidden_gpu, pytest_collection_modifyitems, seen_gpu"
CASES = """
import os, subprocess, sys
import pytest, torch
SEES = torch.cuda.is_available()

@pytest.fixture(scope="module")
def early():
    return torch.cuda.is_available(), torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")

@pytest.fixture(scope="module", autouse=True)
def first():
    assert not torch.cuda.is_available()

def test_sees_none(early):
    assert early == (False, 0, "")
    command = [sys.executable, "-c", "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "''"

@pytest.mark.gpu
def test_sees_it():
    assert SEES and torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

def test_sees_none_again(monkeypatch):
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert torch.cuda.device_count() == 3
"""


@pytest.mark.slow
@pytest.mark.outside
@pytest.mark.parametrize(("has_gpu", "outcome"), [(True, "3 passed"), (False, "1 failed, 1 passed, 1 skipped")])
def test_only_marked_tests_see_the_gpu(tmp_path, monkeypatch, has_gpu, outcome):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS}:{tmp_path}")
    (tmp_path / "with_gpu.py").write_text(PLUGIN)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(
        CASES.replace("assert not torch.cuda.is_available()", "pass") if not has_gpu else CASES
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: sees it\n")
    plugins = ["-p", "no:cacheprovider", *(["-p", "with_gpu"] if has_gpu else [])]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert outcome in done.stdout, done.stdout + done.stderr
