"""What a run's folder says of its training: the figures of the newest step, and the newest checkpoint."""

from pathlib import Path

import msgspec

from lachesis.pipeline.training.tracking import METRICS_FILE

__all__ = ["newest_checkpoint", "newest_figures", "progress_line"]

_POINTER = Path("checkpoints") / "latest"
_MOST = 1 << 16
"""Bytes from the end of the log of figures that are read: more than a line."""


def newest_figures(folder: Path) -> dict[str, float]:
    """Return the figures of the newest step, empty before the first."""
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _MOST))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line break is still being written
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(lines[-1], type=dict[str, float]) if lines else {}


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint, None where there is none."""
    pointer = folder / _POINTER
    return pointer.with_name(pointer.read_text().strip()) if pointer.is_file() else None


def progress_line(figures: dict[str, float], steps: int | None) -> str:
    """Return how far the training is, in one line."""
    known = {
        "reward": figures.get("reward/mean"),
        "staleness": figures.get("staleness/mean"),
        "e2e p99 s": figures.get("latency/e2e/p99"),
    }
    told = "".join(f", {name} {value:.3g}" for name, value in known.items() if value is not None)
    return f"step {figures['train/step']:.0f}{'' if steps is None else f'/{steps}'}{told}"
