"""The tests of training, model and inference on this machine, those of memory shared on a GPU first."""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

from gpu.figures import check, figure, left_out
from gpu.models import DEVICE

__all__ = ["measure"]

_TESTS = Path(__file__).parents[2]
_FIRST = (
    "unit/inference/engines/vllm/test_gpu_segment.py",
    "unit/inference/engines/reference/test_gpu_engine.py",
    "unit/model/test_device.py",
)
_ALL = ("unit/trainer", "unit/model", "unit/inference", "unit/offline/reproduction")
_NEEDS = {
    "unit/trainer/test_adapters.py": "peft",
    "unit/extensions/mlflow/test_tracker.py": "mlflow",
    "unit/extensions/tensorboard/test_tracker.py": "tensorboard",
}
"""Tests that need a package which a bare machine may lack."""


def measure(*, small: bool) -> None:
    """Run them; in small only the first ones, since CI runs all of them."""
    _run("shared memory and device", _FIRST, [])
    if not small:
        lacking = {place: package for place, package in _NEEDS.items() if find_spec(package) is None}
        for place, package in lacking.items():
            left_out(place, f"{package} is not installed")
        together = ["-n", "8"] if find_spec("xdist") is not None else []
        _run("training, model and inference", _ALL, [f"--ignore={_TESTS / place}" for place in lacking] + together)


def _run(name: str, places: tuple[str, ...], options: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="lachesis suite ") as place:
        report = Path(place) / "report.xml"
        without = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "gpu.failure_lines"]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *without, *options]
        command += [f"--junitxml={report}", *(str(_TESTS / each) for each in places)]
        code = subprocess.run(command, cwd=_TESTS.parent, stdout=sys.stderr, check=False).returncode
        if not report.exists():
            check(f"tests of {name} on {DEVICE}", ok=False, text=f"pytest ended with code {code}")
            return
        cases = [*ET.parse(report).iter("testcase")]  # noqa: S314 - pytest wrote it just now
    failed = [
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    figure(f"tests of {name}", len(cases), "tests")
    check(f"tests of {name} pass on {DEVICE}", code == 0 and not failed, "; ".join(failed)[:600])
