"""What a part of the GPU's script found, as lines of JSON: to the script that started it, else to standard output."""

import json
import os
import sys
from typing import Any

__all__ = ["FIGURES_FD", "check", "figure", "left_out"]

FIGURES_FD = "GPU_FIGURES_FD"
"""Number of the file descriptor that lines are written to."""


def figure(name: str, value: float | None, unit: str, **more: Any) -> None:
    """Give a measured value; None: it could not be measured, for the reason that `more` has under `why`."""
    rounded = value if value is None else float(f"{value:.4g}")
    _write({"figure": name, "value": rounded, "unit": unit, **more})


def check(name: str, ok: bool, text: str = "") -> None:
    """Say whether something holds."""
    _write({"check": name, "ok": bool(ok), "text": text})


def left_out(name: str, why: str) -> None:
    """Say what is not measured on this machine, and why."""
    _write({"left_out": name, "why": why})


def _write(line: dict[str, Any]) -> None:
    data = json.dumps(line) + "\n"
    if FIGURES_FD in os.environ:
        os.write(int(os.environ[FIGURES_FD]), data.encode())
    else:
        sys.stdout.write(data)
        sys.stdout.flush()
