"""Figures of a benchmark run: what they cost a group, how they compare with another run, and how they are shown."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

__all__ = [
    "Figure",
    "Recorded",
    "Snapshot",
    "beside",
    "compare",
    "cost_of",
    "median_figures",
    "ratio",
    "table",
    "write_figures",
]

NOTEWORTHY = 0.2
"""Relative change from which a figure is marked: ratios of one run on a shared machine hold to about so much."""
_LESS_IS_BETTER = ("ms", "CPU s", "MB", "times")


class Figure(msgspec.Struct, frozen=True):
    """One measured figure. `scenario` says under which load, `name` what, `unit` in what."""

    scenario: str
    name: str
    unit: str
    value: float

    @property
    def key(self) -> str:
        return f"{self.scenario}: {self.name}, {self.unit}"

    @property
    def less_is_better(self) -> bool:
        return self.unit.startswith(_LESS_IS_BETTER)


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run of the benchmark, as it is written: `beside` is the share of the cores that other processes took."""

    commit: str
    when: str
    machine: str
    versions: dict[str, str]
    beside: float
    figures: list[Figure]
    left_out: list[str] = []
    """What did not run, and why."""


class Snapshot(msgspec.Struct, frozen=True):
    """What processes have used at a moment: CPU seconds and resident bytes by name, and the machine's busy seconds."""

    groups: int
    time_s: float
    cpu_s: dict[str, float]
    resident: dict[str, int]
    machine_busy_s: float


def beside(first: Snapshot, last: Snapshot, cores: int) -> float:
    """Return the share of the cores that processes other than the measured ones took between two snapshots."""
    ours = sum(last.cpu_s.values()) - sum(first.cpu_s.values())
    others = last.machine_busy_s - first.machine_busy_s - ours
    return max(0.0, others) / (cores * (last.time_s - first.time_s))


def cost_of(scenario: str, first: Snapshot, last: Snapshot, samples: int) -> list[Figure]:
    """Return rates between two snapshots, and the CPU time of a group by process and in all.

    Raises `ValueError` if no group arrived between them.
    """
    groups, seconds = last.groups - first.groups, last.time_s - first.time_s
    if groups <= 0 or seconds <= 0:
        raise ValueError(f"{scenario}: no group arrived between the snapshots")
    each = {name: 1e3 * (last.cpu_s[name] - first.cpu_s[name]) / groups for name in last.cpu_s}
    return [
        Figure(scenario, "rate", "groups/s", groups / seconds),
        Figure(scenario, "rate", "trajectories/s", samples * groups / seconds),
        Figure(scenario, "CPU a group", "ms", sum(each.values())),
        *(Figure(scenario, f"CPU a group, {name}", "ms", cost) for name, cost in each.items()),
    ]


def ratio(figures: Iterable[Figure], of: str, to: str, name: str = "rate", unit: str = "groups/s") -> Figure | None:
    """Return by how much scenario `of` exceeds scenario `to` of the same run; None if one of them is missing."""
    values = {figure.scenario: figure.value for figure in figures if (figure.name, figure.unit) == (name, unit)}
    if not values.get(to) or of not in values:
        return None
    return Figure(f"{of} / {to}", name, "ratio", values[of] / values[to])


def median_figures(rounds: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return each figure's median over the rounds that have it, in the order of their first appearance."""
    found: dict[str, list[Figure]] = {}
    for figures in rounds:
        for figure in figures:
            found.setdefault(figure.key, []).append(figure)
    return [msgspec.structs.replace(same[0], value=median(one.value for one in same)) for same in found.values()]


def compare(now: Iterable[Figure], before: Iterable[Figure]) -> dict[str, float]:
    """Return by key of figure how much better it is than before: 1.25 is a quarter better, whichever way better is."""
    known = {figure.key: figure.value for figure in before}
    return {
        figure.key: known[figure.key] / figure.value if figure.less_is_better else figure.value / known[figure.key]
        for figure in now
        if known.get(figure.key) and figure.value
    }


def table(figures: Iterable[Figure], gains: Mapping[str, float]) -> str:
    """Return lines with each figure and, where there is one to compare with, its gain; large changes are marked."""
    lines, scenario = [], ""
    for figure in figures:
        if figure.scenario != scenario:
            scenario = figure.scenario
            lines.append(scenario)
        line = f"  {figure.name:34} {figure.value:12,.4g} {figure.unit:16}"
        if (gain := gains.get(figure.key)) is not None:
            mark = " better" if gain >= 1 + NOTEWORTHY else " WORSE" if gain <= 1 / (1 + NOTEWORTHY) else ""
            line += f" {gain:6.2f} x{mark}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def write_figures(path: Path | None, figures: Sequence[Figure]) -> None:
    """Write figures of a benchmark that runs alone; None: nowhere."""
    if path is not None:
        path.write_bytes(msgspec.json.encode(figures))
