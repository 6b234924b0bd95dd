"""Where the figures of a step go: a JSON-lines file in the run's folder, and wandb when a project is set.

Guarantees that the file holds each step once: a trainer that goes on from a checkpoint trains the steps after it again,
and what a life before wrote of those is cut off first. A run goes on under the same wandb id, with the step of the
trainer as the step of wandb, which takes no figure of a step twice.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Self

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.secrets import masked
from lachesis.schemas.errors import StartupError

__all__ = ["METRICS_FILE", "Tracking"]

METRICS_FILE = "metrics.jsonl"


class _Row(msgspec.Struct):
    step: float = msgspec.field(name="train/step", default=0.0)


class Tracking:
    """An open log of figures; a context that closes it. `resume` comes before the first `log`.

    `name` tells it apart in wandb; left out, it is the run's.
    """

    def __init__(self, config: RunConfig, name: str | None = None) -> None:
        config.path.mkdir(parents=True, exist_ok=True)
        self._path = config.path / METRICS_FILE
        self._file = self._path.open("ab", buffering=0)
        self._wandb = _open_wandb(config, name or config.run) if config.training.wandb.project else None
        self._rows = config.training.wandb.table_rows
        self._step = 0

    def resume(self, step: int) -> None:
        """Keep the figures up to optimizer step `step` alone: those after it come again."""
        self._step = step
        rows = self._path.read_bytes().splitlines(keepends=True)
        kept = [row for row in rows if _step_of(row) <= step]
        if kept == rows:
            return
        partial = self._path.with_name(f".{METRICS_FILE}.partial")
        with partial.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def log(self, figures: dict[str, float]) -> None:
        """Write one step's figures; `train/step` is the step axis."""
        self._step = int(figures.get("train/step", self._step))
        self._file.write(msgspec.json.encode(figures) + b"\n")
        if self._wandb is not None:
            self._wandb.log(figures, step=self._step)

    def samples(self, rows: list[tuple[str, str, str, float | None]]) -> None:
        """Log a table of (item, prompt, completion, advantage), of which a bounded number is shown."""
        if self._wandb is not None and self._rows:
            import wandb

            columns = ["item", "prompt", "completion", "advantage"]
            table = wandb.Table(columns=columns, data=[list(row) for row in rows[: self._rows]])
            self._wandb.log({"samples": table, "train/step": self._step}, step=self._step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()


def _step_of(row: bytes) -> float:
    """Return the step of a line of figures; one that was cut off belongs to none that is kept."""
    try:
        return msgspec.json.decode(row, type=_Row).step if row.endswith(b"\n") else float("inf")
    except msgspec.DecodeError:
        return float("inf")


def _open_wandb(config: RunConfig, name: str) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise StartupError("training.wandb.project is set: pip install 'lachesis-rl[wandb]'") from error
    if not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") is None:
        os.environ["WANDB_MODE"] = "offline"  # without a key a run is kept on disk, to be synced later
    run_id = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    run = wandb.init(
        project=config.training.wandb.project,
        id=run_id,
        name=name,
        resume="allow",
        dir=Path(config.path),
        config=masked("", msgspec.to_builtins(config)),
    )
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run
