"""Real vLLM as policy: weights by files and by shared memory, its logprobs beside those of the learner's model."""

import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.figures import left_out

__all__ = ["VLLM_PYTHON", "measure"]

VLLM_PYTHON = "VLLM_PYTHON"
"""Names an interpreter that has vLLM, if this one has none."""
_SUPPORTED = (0, 32)
"""The oldest release that this project speaks; for an older one `gpu.vllm_026` stands in between."""


def measure(*, small: bool) -> None:
    """Run all of it."""
    del small
    python = _interpreter()
    version = _version_of(python)
    if version is None:
        left_out("vLLM", f"{python} has none: name an interpreter that has it in {VLLM_PYTHON}")
        return
    print(f"vLLM {version} of {python}", file=sys.stderr)
    from gpu.vllm_server import measure_server  # with torch and transformers, which take their time

    with tempfile.TemporaryDirectory(prefix="lachesis-vllm-") as place:
        measure_server(_command(python, version, Path(place)), Path(place))


def _interpreter() -> str:
    made = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
    return os.environ.get(VLLM_PYTHON) or (str(made) if made.exists() else sys.executable)


def _version_of(python: str) -> str | None:
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    found = subprocess.run([python, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def _command(python: str, version: str, folder: Path) -> str:
    """Return the interpreter, or for an older release a script that puts `gpu.vllm_026` in front of it."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= _SUPPORTED:
        return python
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{python}" -m gpu.vllm_026 "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)
