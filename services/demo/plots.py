"""The demo's pictures, PNG: reward, held-out curve, difficulty, latency, distance to the teacher."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.services.demo.observed import RunObservation
from lachesis.services.demo.summary import DemoSummary

__all__ = ["draw_plots", "smoothed"]

_Point = tuple[float | None, float | None]


def draw_plots(
    folder: Path,
    summary: DemoSummary,
    observed: RunObservation,
    figures: Sequence[Mapping[str, float]],
    difficulties: Sequence[float | None],
) -> list[Path]:
    """Write the pictures into `folder` and return their paths. What has no data yet is drawn empty."""
    from matplotlib.figure import Figure

    drawings: dict[str, Callable[[Any], None]] = {
        "reward": lambda axes: _reward(axes, figures),
        "held_out": lambda axes: _held_out(axes, summary),
        "difficulty": lambda axes: _difficulty(axes, observed, difficulties),
        "latency": lambda axes: _latency(axes, summary),
        "teacher": lambda axes: _teacher(axes, figures),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in drawings.items():
        figure: Any = Figure(figsize=(7, 4), layout="constrained")
        draw(figure.subplots())
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        written.append(path)
    return written


def _reward(axes: Any, figures: Sequence[Mapping[str, float]]) -> None:
    points = [(step["train/step"], step["reward/mean"]) for step in figures if "reward/mean" in step]
    axes.plot(*_columns(points), marker=".")
    axes.set(title="Reward of the trained groups", xlabel="optimizer step", ylabel="mean score")


def _teacher(axes: Any, figures: Sequence[Mapping[str, float]]) -> None:
    labels = {"teacher/kl": "of the sampled tokens", "teacher/kl_topk": "over the teacher's likeliest tokens"}
    for figure, label in labels.items():
        points = [(step["train/step"], step[figure]) for step in figures if figure in step]
        if points:
            axes.plot(*_columns(points), marker=".", label=label)
            axes.legend(loc="best")
    axes.set(title="KL of the policy to its teacher", xlabel="optimizer step", ylabel="nats a token")


def _held_out(axes: Any, summary: DemoSummary) -> None:
    rows = summary.held_out
    axes.plot([row["step"] for row in rows], [row["avg"] for row in rows], marker="o", label="sampled, temperature 1")
    greedy = [(row["step"], row["greedy"]) for row in rows if row["greedy"] is not None]
    axes.plot(*_columns(greedy), marker="s", linestyle="none", label="greedy")
    axes.set(title="Held-out pass rate", xlabel="optimizer step", ylabel="pass rate", ylim=(0, 1))
    axes.legend(loc="lower right")


def _difficulty(axes: Any, observed: RunObservation, difficulties: Sequence[float | None]) -> None:
    declared, success = defaultdict(list), defaultdict(list)
    for drawn in observed.drawn.values():
        known = drawn.index is not None and drawn.index < len(difficulties)
        difficulty = difficulties[drawn.index] if known and drawn.index is not None else None
        if difficulty is not None:
            declared[drawn.policy_step].append(difficulty)
        if drawn.success is not None:
            success[drawn.policy_step].append(drawn.success)
    _smooth_line(axes, declared, "tab:blue")
    axes.set(title="What the curriculum drew", xlabel="policy step", ylabel="mean declared difficulty")
    right = axes.twinx()
    _smooth_line(right, success, "tab:orange")
    right.set(ylabel="mean success of the drawn groups", ylim=(0, 1))
    axes.yaxis.label.set_color("tab:blue")
    right.yaxis.label.set_color("tab:orange")


def _smooth_line(axes: Any, values: Mapping[int, Sequence[float]], color: str) -> None:
    """Draw the mean over the steps nearby as a line, and that of each step as a faint point."""
    axes.plot(*_columns(_means(values)), color=color, marker=".", linestyle="none", alpha=0.25)
    axes.plot(*_columns(smoothed(values)), color=color, linewidth=2)


def smoothed(values: Mapping[int, Sequence[float]]) -> list[_Point]:
    """Return the mean at each step of all values up to a twentieth of all steps before and after it."""
    steps = sorted(values)
    reach = max(1, (steps[-1] - steps[0]) // 20) if steps else 0
    points: list[_Point] = []
    for step in steps:
        near = [value for other in steps if abs(other - step) <= reach for value in values[other]]
        points.append((step, sum(near) / len(near)))
    return points


def _latency(axes: Any, summary: DemoSummary) -> None:
    """Draw a point at the median and a line to the 99th percentile: a length from 0 has no place on a log axis."""
    rows = [row for row in summary.run.services if row.wait.p99 or row.process.p99]
    for offset, what, color in ((-0.15, "wait", "tab:blue"), (0.15, "process", "tab:orange")):
        times = [(i + offset, getattr(row, what)) for i, row in enumerate(rows)]
        shown = [(place, time.p50, time.p99) for place, time in times if time.p50 and time.p99]
        places, medians, tails = zip(*shown, strict=True) if shown else ((), (), ())
        axes.hlines(places, medians, tails, color=color, linewidth=2)
        axes.plot(medians, places, "o", color=color, label=f"{what}: p50, line to p99")
        axes.plot(tails, places, "|", color=color)
        if shown:
            axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), [row.service for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.set(title="Latency by stage", xlabel="seconds")
    axes.figure.legend(loc="outside lower center", ncols=2)


def _means(values: Mapping[int, Sequence[float]]) -> list[_Point]:
    return [(step, sum(found) / len(found)) for step, found in sorted(values.items())]


def _columns(points: Sequence[_Point]) -> tuple[list[float | None], list[float | None]]:
    return [x for x, _ in points], [y for _, y in points]
