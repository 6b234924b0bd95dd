"""Finds whether an interpreter has vLLM: it looks up the version, and does not import vLLM."""

import subprocess

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok

__all__ = ["check_vllm"]

_BESIDE_VLLM = ("blake3", "msgspec", "numpy", "safetensors", "torch")
"""What this project's own code imports inside vLLM; releases of vLLM that it speaks bring them all."""
_FIND_VLLM = f"""
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
try:
    found = version("vllm")
except PackageNotFoundError:  # builds for a CPU have another name
    found = version(packages_distributions().get("vllm", ["vllm"])[0])
print(found, *(name for name in {_BESIDE_VLLM} if find_spec(name) is None))
"""
_PYTHON_S = 30


def check_vllm(setting: str, python: str) -> DoctorFinding:
    """Return whether the interpreter that `setting` names has vLLM, and what our part of it needs."""
    mend = f"{python} -m pip install vllm, or name another interpreter"
    try:
        done = subprocess.run(
            [python, "-c", _FIND_VLLM], capture_output=True, text=True, timeout=_PYTHON_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return fail(setting, f"{python} does not run: {error}", "name an interpreter that has vLLM")
    version, *missing = done.stdout.split() or [""]
    if done.returncode != 0 or not version:
        said = (done.stderr.strip().splitlines() or ["no version"])[-1]
        return fail(setting, f"{python} has no vLLM ({said})", mend)
    if missing:
        text = f"{python} has vLLM {version} without {', '.join(missing)}, which its part of this project needs"
        return fail(setting, text, f"{python} -m pip install {' '.join(missing)}")
    return ok(setting, f"vLLM {version}, {python}; not started")
