"""Holds what a group costs each process, by `load_costs.json`, and fits it to recorded benchmarks.

A process takes `group_ms` of processor time for each group, `megabyte_ms` for each 10^6 bytes of its rollout and
`batch_ms` for each batch. It takes `lone_ms` more for a group whose messages come one by one: a reader that is woken
for one message pays alone what several messages share that wait together. In a second without a group it takes
`idle_ms`. The share of groups that come one by one falls from 1 to 0 while the rate rises to the one at which the
process, or the machine that it shares, has no time left between two groups.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum import stage as curriculum
from lachesis.pipeline.health import stage as health

__all__ = ["TABLE", "CostTable", "Observation", "ProcessCost", "fit_costs", "lone_share", "read_costs"]

TABLE = Path(__file__).with_name("load_costs.json")
_ALL = ("group_ms", "megabyte_ms", "batch_ms", "lone_ms")
_TERMS = {
    "producer": ("group_ms", "megabyte_ms", "lone_ms"),
    "scorer": ("group_ms", "megabyte_ms", "lone_ms"),
    "governor": ("group_ms", "batch_ms", "lone_ms"),
    "normalizer": ("group_ms", "lone_ms"),
    "batcher": ("group_ms", "batch_ms", "lone_ms"),
    "curriculum": ("group_ms", "lone_ms"),
    "health": ("group_ms", "lone_ms"),
}
"""Terms that a process can have: one that reads no payload pays for no bytes, one that sees no batch for none."""
_GATHER_S = {"curriculum": curriculum.GATHER_S, "health": health.GATHER_S}
"""Seconds for which a process lets messages gather."""


class ProcessCost(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time of one process, milliseconds; see the module's docstring. `gather_s`: how long it lets messages
    gather before it reads them, seconds.
    """

    group_ms: float
    megabyte_ms: float
    batch_ms: float
    lone_ms: float
    idle_ms: float = 0.0
    gather_s: float = 0.0

    def busy_ms(self, megabytes: float, batch_groups: float) -> float:
        """Return what a group takes where its messages come together with others."""
        return self.group_ms + self.megabyte_ms * megabytes + self.batch_ms / batch_groups

    def per_group_ms(self, megabytes: float, batch_groups: float, lone: float) -> float:
        """Return what a group takes where a share `lone` of groups comes one by one. `idle_ms` is not in it."""
        return self.busy_ms(megabytes, batch_groups) + self.lone_ms * lone


class CostTable(msgspec.Struct, frozen=True, kw_only=True):
    """Costs by process, and where they come from.

    `together_groups_per_s` is the rate from which on no group came alone. `loop_ms` is what `measure_loop` took on that
    machine; None: not measured there.
    """

    origin: list[str]
    machine: str
    together_groups_per_s: float
    loop_ms: float | None = None
    processes: dict[str, ProcessCost]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Processor time of one process in one recorded phase, milliseconds a group. `saturated`: groups waited for one
    another, so none came alone, however few a second there were.
    """

    process: str
    groups_per_s: float
    megabytes: float
    batch_groups: float
    cpu_ms: float
    saturated: bool = False

    def lone(self, together_groups_per_s: float) -> float:
        """Return the share of groups whose messages came one by one."""
        gather_s = _GATHER_S.get(self.process, 0.0)
        return 0.0 if self.saturated else lone_share(self.groups_per_s, together_groups_per_s, gather_s)


def lone_share(groups_per_s: float, together_groups_per_s: float, gather_s: float = 0.0) -> float:
    """Return the share of groups whose messages come one by one, given the rate from which on none does.

    A process that lets messages gather is woken for the first of those alone that come in that time.
    The square fits what was recorded: groups at an even pace hardly meet before there is little time between them.
    """
    return max(0.0, 1.0 - (groups_per_s / together_groups_per_s) ** 2) / (1.0 + gather_s * groups_per_s)


@cache
def read_costs() -> CostTable:
    """Return the table of this package."""
    return msgspec.json.decode(TABLE.read_bytes(), type=CostTable)


def fit_costs(
    observations: Iterable[Observation], idle_ms: Mapping[str, float], together_groups_per_s: float
) -> dict[str, ProcessCost]:
    """Return the costs by process that fit best, by least squares of relative errors, none below 0.

    `idle_ms`: by process what it takes in a second of a run that stands still; 0 where it is not named.
    """
    by_process: dict[str, list[Observation]] = {}
    for one in observations:
        by_process.setdefault(one.process, []).append(one)
    found = {}
    for process, rows in by_process.items():
        idle = idle_ms.get(process, 0.0)
        terms = _TERMS.get(process, _ALL)
        matrix = np.array([[_amounts(row, together_groups_per_s)[term] for term in terms] for row in rows])
        measured = np.array([row.cpu_ms - idle / row.groups_per_s for row in rows])
        weight = 1 / np.array([row.cpu_ms for row in rows])
        values = _least_squares(matrix * weight[:, None], measured * weight)
        fitted = {term: round(float(value), 4) for term, value in zip(terms, values, strict=True)}
        found[process] = ProcessCost(
            **{**dict.fromkeys(_ALL, 0.0), **fitted}, idle_ms=round(idle, 3), gather_s=_GATHER_S.get(process, 0.0)
        )
    return found


def _amounts(row: Observation, together_groups_per_s: float) -> dict[str, float]:
    """Return by term how much of it a group has."""
    return {
        "group_ms": 1.0,
        "megabyte_ms": row.megabytes,
        "batch_ms": 1 / row.batch_groups,
        "lone_ms": row.lone(together_groups_per_s),
    }


def _least_squares(matrix: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the solution without negative terms that is nearest: of all sets of terms the best one. They are few."""
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.sum(values**2))
    for chosen in range(1, 1 << columns):
        places = [place for place in range(columns) if chosen >> place & 1]
        terms = np.linalg.lstsq(matrix[:, places], values, rcond=None)[0]
        error = float(np.sum((matrix[:, places] @ terms - values) ** 2))
        if error < least and (terms >= 0).all():
            best, least = np.zeros(columns), error
            best[places] = terms
    return best
