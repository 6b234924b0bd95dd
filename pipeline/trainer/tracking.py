"""Writes the figures of each step to the run's folder, and sends them to the configured trackers.

Guarantees that the file holds each step once: a trainer that goes on from a checkpoint trains the steps after it again,
and first cuts off what an earlier life wrote of those steps. Trackers get the same figures through outboxes, so that
none delays a step.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import msgspec

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.pipeline.trainer.tracker import STEP, Outbox, Tracker
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json

log = logging.getLogger("lachesis")

__all__ = ["CLOSE_S", "METRICS_FILE", "Tracking", "append_row", "open_tracking"]

METRICS_FILE = "metrics.jsonl"
CLOSE_S = 30.0
"""What trackers have, once the body is done, to take what still waits."""


class _FiguresRow(msgspec.Struct):
    step: float = msgspec.field(name=STEP, default=0.0)


class Tracking:
    """A log of figures, as `open_tracking` opens it. `resume` comes before the first `log`."""

    def __init__(self, folder: Path, sample_rows: int, outboxes: Sequence[Outbox]) -> None:
        self._path = folder / METRICS_FILE
        self._outboxes = outboxes
        self._rows = sample_rows
        self._step = self._resumed_step = 0
        self._resumed = anyio.Event()

    @property
    def tracks(self) -> bool:
        """Whether there is a tracker at all."""
        return bool(self._outboxes)

    async def resume(self, step: int) -> None:
        """Keep the figures up to optimizer step `step` alone: those after it come again."""
        self._step = self._resumed_step = step
        rows = self._read_rows()
        kept = [row for row in rows if _step_of(row) <= step]
        if kept != rows:
            await self._replace_rows(kept)
        self._resumed.set()

    async def log(self, figures: dict[str, float]) -> None:
        """Write one step's figures, when the disk has room for them; `train/step` is the step axis."""
        self._step = int(figures.get(STEP, self._step))
        row = msgspec.json.encode(figures) + b"\n"
        await write_when_room(self._path, lambda: append_row(self._path, row), needed_bytes=len(row))
        self._log_figures(figures, len(row))

    async def add_figures(self, figures: dict[str, float]) -> None:
        """Add figures, which are known only now, to those of the last step."""
        rows = self._read_rows()
        if not rows or _step_of(rows[-1]) != self._step:
            return  # a step of a void batch, or of a life before, of which nothing was logged
        last = msgspec.json.decode(rows[-1], type=dict[str, float]) | figures
        rows[-1] = msgspec.json.encode(last) + b"\n"
        await self._replace_rows(rows)
        self._log_figures(figures, len(rows[-1]))

    def _log_figures(self, figures: dict[str, float], nbytes: int) -> None:
        for outbox in self._outboxes:
            outbox.put(partial(outbox.tracker.log_figures, dict(figures), self._step), nbytes)

    async def _replace_rows(self, rows: list[bytes]) -> None:
        data = b"".join(rows)
        await write_when_room(self._path, partial(replace_file, self._path, data), needed_bytes=len(data))

    def _read_rows(self) -> list[bytes]:
        try:
            with open_regular_file(self._path) as file:
                return file.readlines()
        except FileNotFoundError:
            return []

    def log_samples(self, samples: Sequence[ReadableSample]) -> None:
        """Send the first `training.sample_rows` samples to the trackers."""
        rows = [row.shortened() for row in samples[: self._rows]]
        for outbox in self._outboxes if rows else ():
            nbytes = sum(len(row.item) + len(row.prompt) + len(row.completion) for row in rows) * 4  # at most, in UTF-8
            outbox.put(partial(outbox.tracker.log_samples, rows, self._step), nbytes)

    async def log_alert(self, alert: AlertNotification) -> None:
        """Send an alert to the trackers; returns once all have taken it."""
        sent = [
            outbox.put(partial(outbox.tracker.log_alert, alert, self._step), len(alert.text) * 4)
            for outbox in self._outboxes
        ]
        for event in sent:
            await event.wait()

    async def send(self, outbox: Outbox, ended: anyio.Event) -> None:
        """Send what waits in an outbox, from the step on at which the log was resumed, until it is closed."""
        await self._resumed.wait()
        await outbox.send(self._resumed_step, self._figures_after)
        ended.set()

    def _figures_after(self, step: int) -> list[dict[str, float]]:
        """Return the figures of each step after `step`, up to the one at which the log was resumed."""
        rows = [row for row in self._read_rows() if step < _step_of(row) <= self._resumed_step]
        return [msgspec.json.decode(row, type=dict[str, float]) for row in rows]


@asynccontextmanager
async def open_tracking(
    folder: Path,
    sample_rows: int,
    trackers: Iterable[Tracker] = (),
    set_note: Callable[[str, str | None], None] = lambda _name, _text: None,
) -> AsyncIterator[Tracking]:
    """Open the log of figures of a run, in its `folder`.

    `trackers` get what the file gets, alerts, and tables of `sample_rows` samples. `set_note(name, text)` says which of
    them is away. Once the body is done, they have 30 s to take what still waits; none is waited for where it failed.
    """
    outboxes = [Outbox(tracker, set_note) for tracker in trackers]
    tracking, ends = Tracking(folder, sample_rows, outboxes), [anyio.Event() for _ in outboxes]
    async with background() as tasks:
        for outbox, ended in zip(outboxes, ends, strict=True):
            tasks.start_soon(tracking.send, outbox, ended)
        yield tracking
        for outbox in outboxes:
            outbox.close()
        with anyio.move_on_after(CLOSE_S):
            for ended in ends:
                await ended.wait()
        for outbox, ended in zip(outboxes, ends, strict=True):
            if not ended.is_set():
                log.warning("%s was away or too slow at the end, so up to %d entries were not sent; metrics.jsonl "
                            "holds every figure", outbox.tracker.name, outbox.waiting + 1)  # fmt: skip


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


def _step_of(row: bytes) -> float:
    """Return the step of a line of figures; one that was cut off belongs to none that is kept."""
    try:
        return from_json(METRICS_FILE, _FiguresRow, row).step if row.endswith(b"\n") else float("inf")
    except SchemaError:
        return float("inf")
