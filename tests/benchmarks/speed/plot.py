"""A picture of a benchmark run: rates beside others, what a group costs by process, latencies."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Canvas
from speed.figures import Figure

__all__ = ["draw"]

_BY_PROCESS = "CPU a group, "


def _of(figures: Sequence[Figure], name: str, unit: str) -> dict[str, float]:
    return {figure.scenario: figure.value for figure in figures if (figure.name, figure.unit) == (name, unit)}


def draw(figures: Sequence[Figure], path: Path, title: str) -> None:
    """Write the picture to `path`."""
    canvas = Canvas(figsize=(11, 15), layout="constrained")
    rates, costs, latencies = canvas.subplots(3, 1)
    found = _of(figures, "rate", "groups/s")
    rates.barh(list(found), list(found.values()))
    rates.set(xscale="log", xlabel="groups/s", title=title)
    left = dict.fromkeys(_of(figures, "CPU a group", "ms"), 0.0)
    for name in dict.fromkeys(figure.name for figure in figures if figure.name.startswith(_BY_PROCESS)):
        values = _of(figures, name, "ms")
        costs.barh(
            list(values), list(values.values()), left=[left[scenario] for scenario in values],
            label=name.removeprefix(_BY_PROCESS),
        )  # fmt: skip
        for scenario, value in values.items():
            left[scenario] += value
    costs.set(xlabel="CPU ms a group")
    if left:
        costs.legend(fontsize="small", ncols=2)
    for quantile in (50, 99):
        values = _of(figures, f"publish to trainer, p{quantile}", "ms")
        latencies.plot(list(values.values()), list(values), "o", label=f"p{quantile}")
    latencies.set(xscale="log", xlabel="ms from publication to the trainer")
    latencies.legend()
    for axes in (rates, costs, latencies):
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize="small")
    canvas.savefig(path, dpi=90)
