"""Converts SmolLM2 into the cache of this folder, where its demo finds it: no demo is timed while it converts."""

import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from gpu.demo_run import CACHE
from gpu.figures import figure, left_out

from lachesis.services.demo.pretrained import MODULES, prepare_pretrained
from lachesis.services.demo.settings import DemoOptions, demo_config

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Convert it; one that is converted stays."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        left_out("SmolLM2", f"{', '.join(missing)} missing: see tests/gpu/README.md")
        return
    with tempfile.TemporaryDirectory(prefix="lachesis convert ") as place:
        CACHE.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        made = prepare_pretrained(demo_config(DemoOptions(model="smollm2", folder=Path(place) / "run")), CACHE)
        kind = "taken from the cache" if made.cached else "converted"
        figure(f"SmolLM2 {kind}", time.perf_counter() - began, "s")
