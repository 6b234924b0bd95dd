"""The pictures of a run, PNG: rewards, held-out rates, latency by stage.

What has no data yet is not drawn.
"""

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.schemas.annotations import EvalEvent

__all__ = ["draw_run"]


def draw_run(folder: Path, steps: Sequence[Mapping[str, float]], evaluations: Sequence[EvalEvent]) -> list[Path]:
    """Write the pictures into `folder` and return their paths.

    `steps`: the figures of each step. Raises ImportError without matplotlib.
    """
    with uncollected_imports():
        from matplotlib.figure import Figure

    drawings = {
        "reward": _draw_rewards(steps),
        "held_out": _draw_held_out(evaluations),
        "latency": _draw_latency(steps),
    }
    written = []
    for name, draw in drawings.items():
        if draw is None:
            continue
        figure: Any = Figure(figsize=(7, 4))
        figure.subplots_adjust(left=0.16, right=0.97, bottom=0.13, top=0.92)  # matplotlib's own layouts draw it twice
        draw(figure.subplots())
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=110)
        replace_file(path, image.getvalue())
        written.append(path)
    return written


def _draw_rewards(steps: Sequence[Mapping[str, float]]) -> Any:
    """Draw the mean score of all groups and of each environment, and the mean rating of each rater."""
    lines: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for figures in steps:
        for name, value in figures.items():
            kind, *path = name.split("/", 3)
            if kind == "reward" and (path == ["mean"] or path[1:] == ["mean"] or path[1:2] == ["rater"]):
                label = " ".join(part for part in path if part not in {"mean", "rater"}) or "all"
                lines[label].append((figures["train/step"], value))
    alone = [label for label in lines if label != "all" and " " not in label]
    if len(alone) == 1:
        del lines[alone[0]]  # the same as all

    def draw(axes: Any) -> None:
        for label, points in lines.items():
            rater = " " in label
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1 if rater else 2, alpha=0.6 if rater else 1)
        axes.set(title="Training reward", xlabel="optimizer step", ylabel="mean score; thin: mean rating")
        axes.legend()

    return draw if lines else None


def _draw_held_out(evaluations: Sequence[EvalEvent]) -> Any:
    by_env: defaultdict[str, list[EvalEvent]] = defaultdict(list)
    for event in evaluations:
        by_env[event.env].append(event)

    def draw(axes: Any) -> None:
        for env, events in by_env.items():
            errors = [event.error or 0.0 for event in events]
            at, rates = [event.policy_step for event in events], [event.avg for event in events]
            axes.errorbar(at, rates, yerr=errors, marker="o", capsize=3, label=f"{env}, sampled")
            greedy = [(event.policy_step, event.greedy) for event in events if event.greedy is not None]
            if greedy:
                axes.plot(*zip(*greedy, strict=True), marker="s", linestyle="none", label=f"{env}, greedy")
        axes.set(title="Held-out rate", xlabel="optimizer step", ylabel="mean success", ylim=(0, 1))
        axes.legend(loc="best")

    return draw if by_env else None


def _draw_latency(steps: Sequence[Mapping[str, float]]) -> Any:
    newest = steps[-1] if steps else {}
    parts = {"wait": "queue wait", "proc": "process"}
    stages = sorted({name.split("/")[1] for name in newest if name.endswith("/rolling_p50") and name.count("/") == 3})

    def draw(axes: Any) -> None:
        for offset, (part, label) in zip((-0.15, 0.15), parts.items(), strict=True):
            known = [
                (index + offset, p50, newest.get(f"latency/{stage}/{part}/rolling_p99", p50))
                for index, stage in enumerate(stages)
                if (p50 := newest.get(f"latency/{stage}/{part}/rolling_p50", 0.0)) > 0
            ]
            (points,) = axes.plot([p50 for _, p50, _ in known], [place for place, _, _ in known], "o", label=label)
            for place, p50, p99 in known:
                axes.hlines(place, p50, p99, color=points.get_color())
        axes.set_yticks(range(len(stages)), stages)
        axes.invert_yaxis()
        axes.set_xscale("log")  # of positive times alone
        axes.set(title="Latency by stage", xlabel="seconds over the last steps: p50, line to p99")
        axes.legend()

    return draw if stages else None
