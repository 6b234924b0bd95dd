"""Where the figures of a step go.

A JSON-lines file in the run's folder, and wandb when a project is set.

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
from lachesis.pipeline.disk import write_when_room
from lachesis.pipeline.installation import install_command
from lachesis.pipeline.small_files import open_regular_file
from lachesis.schemas.errors import SchemaError, StartupError
from lachesis.schemas.values import from_json

__all__ = ["METRICS_FILE", "Tracking", "append_row"]

METRICS_FILE = "metrics.jsonl"


class _FiguresRow(msgspec.Struct):
    step: float = msgspec.field(name="train/step", default=0.0)


class Tracking:
    """An open log of figures; a context that closes it. `resume` comes before the first `log`.

    `name` tells it apart in wandb; left out, it is the run's.
    """

    def __init__(self, config: RunConfig, name: str | None = None) -> None:
        self._path = config.path / METRICS_FILE
        self._wandb = _open_wandb(config, name or config.run) if config.training.wandb.project else None
        self._rows = config.training.wandb.table_rows
        self._step = 0

    async def resume(self, step: int) -> None:
        """Keep the figures up to optimizer step `step` alone: those after it come again."""
        self._step = step
        rows = self._read_rows()
        kept = [row for row in rows if _step_of(row) <= step]
        if kept != rows:
            await write_when_room(self._path, lambda: _replace(self._path, kept), needed_bytes=sum(map(len, kept)))

    async def log(self, figures: dict[str, float]) -> None:
        """Write one step's figures, when the disk has room for them; `train/step` is the step axis."""
        self._step = int(figures.get("train/step", self._step))
        row = msgspec.json.encode(figures) + b"\n"
        await write_when_room(self._path, lambda: append_row(self._path, row), needed_bytes=len(row))
        if self._wandb is not None:
            self._wandb.log(figures, step=self._step)

    async def add_figures(self, figures: dict[str, float]) -> None:
        """Add figures, which are known only now, to those of the last step."""
        rows = self._read_rows()
        if not rows or _step_of(rows[-1]) != self._step:
            return  # a step of a void batch, or of a life before, of which nothing was logged
        last = msgspec.json.decode(rows[-1], type=dict[str, float]) | figures
        rows[-1] = msgspec.json.encode(last) + b"\n"
        await write_when_room(self._path, lambda: _replace(self._path, rows), needed_bytes=sum(map(len, rows)))
        if self._wandb is not None:
            self._wandb.log({**figures, "train/step": self._step}, step=self._step)

    def _read_rows(self) -> list[bytes]:
        try:
            with open_regular_file(self._path) as file:
                return file.readlines()
        except FileNotFoundError:
            return []

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
        if self._wandb is not None:
            self._wandb.finish()


def append_row(path: Path, row: bytes) -> None:
    """Append a whole row, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        rest = row
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(before)
            raise


def _replace(path: Path, rows: list[bytes]) -> None:
    """Put a file of `rows` in the place of `path`, or leave that as it is."""
    partial = path.with_name(f".{METRICS_FILE}.partial")
    try:
        with partial.open("wb") as file:
            file.writelines(rows)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _step_of(row: bytes) -> float:
    """Return the step of a line of figures; one that was cut off belongs to none that is kept."""
    try:
        return from_json(METRICS_FILE, _FiguresRow, row).step if row.endswith(b"\n") else float("inf")
    except SchemaError:
        return float("inf")


def _open_wandb(config: RunConfig, name: str) -> Any:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise StartupError(f"training.wandb.project needs the package wandb: {install_command('wandb')}") from error
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
