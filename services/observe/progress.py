"""Reads the figures of a run's steps from the log in its folder: all of them, or the newest."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json
from lachesis.services.observe.rewards import rewards_of
from lachesis.services.output import human_seconds

__all__ = [
    "all_figures",
    "newest_figures",
    "progress_line",
    "recent_figures",
    "step_times",
    "training_rewards",
]

log = logging.getLogger("lachesis")

_TAIL_BYTES = 1 << 18
"""Bytes from the end of the log of figures that are read: many lines of a few KiB."""


def all_figures(folder: Path) -> Iterator[dict[str, float]]:
    """Yield the figures of every step, oldest first.

    A line that is torn, or still being written, is skipped.
    """
    try:
        with open_regular_file(folder / METRICS_FILE) as file:
            for row in file:
                if row.endswith(b"\n") and (figures := _figures(row)) is not None:
                    yield figures
    except FileNotFoundError:
        return


def newest_figures(folder: Path) -> dict[str, float]:
    """Return the figures of the newest step, empty before the first."""
    return next((figures for row in reversed(_newest_rows(folder)) if (figures := _figures(row)) is not None), {})


def recent_figures(folder: Path) -> list[dict[str, float]]:
    """Return the figures of the newest steps, oldest first: as many as fit into what is read, a few dozen."""
    rows = list(map(_figures, _newest_rows(folder)))
    readable = [figures for figures in rows if figures is not None]
    if len(readable) < len(rows):
        log.warning(
            "%s: %d lines are no figures and were passed over", folder / METRICS_FILE, len(rows) - len(readable)
        )
    return readable


def step_times(folder: Path) -> dict[int, tuple[int, int]]:
    """Return by its number when each of the newest steps that the figures have began and ended, Unix ns."""
    times: dict[int, tuple[int, int]] = {}
    for figures in recent_figures(folder):
        step, end_s, took_s = map(figures.get, ("train/step", "train/time", "latency/trainer/proc/p50"))
        if step is not None and end_s is not None and took_s is not None and float(step).is_integer():
            end_ns = round(end_s * 1e9)
            times[int(step)] = end_ns - round(took_s * 1e9), end_ns  # one stamp for all groups of the batch: exact
    return times


class _StepReward(msgspec.Struct):
    step: float | None = msgspec.field(name="train/step", default=None)
    mean: float | None = msgspec.field(name="reward/mean", default=None)


def training_rewards(folder: Path, first: int, last: int) -> tuple[float, float] | None:
    """Return the mean training rewards of the steps that policies `first` and `last` made.

    Of the first policy, which no step made, that of the step after it. None if the figures do not say. Reads the
    whole log of figures, line by line.
    """
    before = after = None
    try:
        with open_regular_file(folder / METRICS_FILE) as file:
            for row in file:
                if not row.endswith(b"\n"):
                    break  # it is still being written
                try:
                    reward = from_json(METRICS_FILE, _StepReward, row)
                except SchemaError:
                    continue
                if reward.step is None or reward.mean is None:
                    continue
                before = reward.mean if before is None and reward.step >= first else before
                after = reward.mean if reward.step <= last else after
    except FileNotFoundError:
        return None
    return None if before is None or after is None else (before, after)


def _newest_rows(folder: Path) -> list[bytes]:
    try:
        with open_regular_file(folder / METRICS_FILE) as file:
            start = max(0, file.seek(0, 2) - _TAIL_BYTES)
            file.seek(start)
            rows = file.read().split(b"\n")[:-1]  # what follows the last line break is still being written
    except OSError:  # there is none yet, or it cannot be read now
        return []
    return rows[1:] if start else rows  # the first may have lost its beginning


def _figures(row: bytes) -> dict[str, float] | None:
    """Return the figures in a line of the log, None if it holds none: a crash of the machine can tear a line."""
    try:
        return from_json(METRICS_FILE, dict[str, float], row)
    except SchemaError:
        return None


def progress_line(figures: dict[str, float], steps: int | None, held_out: Sequence[str] = ()) -> str:
    """Return how far the training is, in one line.

    `held_out`: the newest evaluations, in a few words each.
    """
    reward, staleness = figures.get("reward/mean"), figures.get("staleness/mean")
    reported = "" if reward is None else f", reward {reward:.3g}"
    means = {env: one.mean for env, one in rewards_of(figures).items() if one.mean is not None}
    if len(means) > 1:
        reported += f" ({', '.join(f'{env} {mean:.3g}' for env, mean in means.items())})"
    reported += f", held-out {'; '.join(held_out)}" if held_out else ""
    reported += "" if staleness is None else f", staleness {staleness:.3g}"
    slowest = human_seconds(figures.get("latency/e2e/p99"))
    reported += f", e2e p99 {slowest}" if slowest else ""
    return f"step {figures['train/step']:.0f}{'' if steps is None else f'/{steps}'}{reported}"
