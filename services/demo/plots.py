"""The demo's pictures, PNG: reward, held-out curve, difficulty of what was drawn, latency by stage."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.services.demo.observed import Observed
from lachesis.services.demo.summary import Summary

__all__ = ["draw_plots"]

_Point = tuple[float | None, float | None]


def draw_plots(
    folder: Path,
    summary: Summary,
    observed: Observed,
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


def _held_out(axes: Any, summary: Summary) -> None:
    rows = summary.evaluations
    axes.plot([row["step"] for row in rows], [row["avg"] for row in rows], marker="o", label="sampled, temperature 1")
    greedy = [(row["step"], row["greedy"]) for row in rows if row["greedy"] is not None]
    axes.plot(*_columns(greedy), marker="s", linestyle="none", label="greedy")
    axes.set(title="Held-out pass rate", xlabel="optimizer step", ylabel="pass rate", ylim=(0, 1))
    axes.legend(loc="lower right")


def _difficulty(axes: Any, observed: Observed, difficulties: Sequence[float | None]) -> None:
    declared, success = defaultdict(list), defaultdict(list)
    for drawn in observed.drawn.values():
        known = drawn.index is not None and drawn.index < len(difficulties)
        difficulty = difficulties[drawn.index] if known and drawn.index is not None else None
        if difficulty is not None:
            declared[drawn.policy_step].append(difficulty)
        if drawn.success is not None:
            success[drawn.policy_step].append(drawn.success)
    axes.plot(*_columns(_means(declared)), color="tab:blue", marker=".")
    axes.set(title="What the curriculum drew", xlabel="policy step", ylabel="mean declared difficulty")
    right = axes.twinx()
    right.plot(*_columns(_means(success)), color="tab:orange", marker=".")
    right.set(ylabel="mean success of the drawn groups", ylim=(0, 1))
    axes.yaxis.label.set_color("tab:blue")
    right.yaxis.label.set_color("tab:orange")


def _latency(axes: Any, summary: Summary) -> None:
    names = [name for name, stage in summary.stages.items() if (stage.wait.p99 or stage.process.p99)]
    height = 0.4
    for offset, what in ((-height / 2, "wait"), (height / 2, "process")):
        times = [getattr(summary.stages[name], what) for name in names]
        places = [i + offset for i in range(len(names))]
        axes.barh(places, [t.p50 or 0 for t in times], height, label=f"{what} p50, line to p99")
        axes.hlines(places, [t.p50 or 0 for t in times], [t.p99 or 0 for t in times], color="black")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1e-4)
    axes.set(title="Latency by stage", xlabel="seconds")
    axes.figure.legend(loc="outside lower center", ncols=2)


def _means(values: Mapping[int, Sequence[float]]) -> list[_Point]:
    return [(step, sum(found) / len(found)) for step, found in sorted(values.items())]


def _columns(points: Sequence[_Point]) -> tuple[list[float | None], list[float | None]]:
    return [x for x, _ in points], [y for _, y in points]
