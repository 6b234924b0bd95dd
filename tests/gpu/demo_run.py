"""Runs `lachesis demo` on the device and gives its figures."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu.figures import check, figure
from gpu.models import DEVICE

__all__ = ["CACHE", "run_demo"]

_CACHES = Path(__file__).parents[2] / "build" / "gpu-cache"  # for XDG_CACHE_HOME
CACHE = _CACHES / "lachesis" / "demo"
"""Where the demo finds models that were made, also those of an earlier call."""


def _is_rate(key: str) -> bool:
    """Whether a figure is a held-out rate, sampled or at temperature 0."""
    return key.startswith("eval/") and ("/avg@" in key or key.endswith("/greedy"))


def run_demo(model: str, steps: int, sets: list[str]) -> None:
    """Run the demo without its gate, and give held-out rates, seconds a step and where they went."""
    name = f"demo {model}"
    with tempfile.TemporaryDirectory(prefix="lachesis demo ") as place:
        folder = Path(place) / "run"
        given = ["--model", model, "--steps", str(steps), "--folder", str(folder), "--no-gate"]
        settings = [f"--set={text}" for text in (f"training.device={DEVICE}", *sets)]
        began = time.perf_counter()
        command = [sys.executable, "-m", "lachesis", "demo", *given, *settings]
        code = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(_CACHES)},
        ).returncode
        took = time.perf_counter() - began
        check(f"{name} ends well on {DEVICE}", code == 0, f"code {code}")
        logged = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in logged.read_bytes().splitlines()] if logged.exists() else []
    trained = [line for line in lines if line.get("train/step") is not None]
    check(f"{name} takes {steps} steps", bool(trained) and trained[-1]["train/step"] == steps)
    figure(f"{name}, from start to end", took, "s", steps=steps)
    if len(trained) > 1:
        whole = trained[-1]["train/time"] - trained[0]["train/time"]
        figure(f"{name}, a step from one to the next", whole / (len(trained) - 1), "s")
    computing = [line["train/seconds"] for line in trained if line.get("train/seconds") is not None]
    if computing:
        figure(f"{name}, an optimizer step", statistics.median(computing), "s")
    for key in sorted({key for line in lines for key in line if _is_rate(key)}):
        rates = [line[key] for line in lines if line.get(key) is not None]
        figure(f"{name}, {key}, first", rates[0], "")
        figure(f"{name}, {key}, last", rates[-1], "")
