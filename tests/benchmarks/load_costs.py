"""Fits what a group costs each process to recorded runs of the benchmark: what `lachesis plan --groups-per-s` reads.

    .venv/bin/python tests/benchmarks/load_costs.py                     # from recorded/*.json into services/run/
    .venv/bin/python tests/benchmarks/load_costs.py measure FILE.json   # shapes and rates that no fit has seen
    .venv/bin/python tests/benchmarks/load_costs.py check FILE.json     # how far predictions are from what FILE has

In a phase that goes flat out, or that does not reach its rate, groups wait for one another, so none comes alone. A fit
uses no phase that did not reach its rate or beside which others took nearly the whole machine; not the begin of a
growing history, in which the processes warm up; and none of many environments, whose messages travel apart, which the
table does not know. The rate from which on no group comes alone is the highest one recorded. Fit on the machine of the
records: what the small loop takes there is kept in the table, for users to compare theirs with.
"""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
from speed.clients import Phase
from speed.figures import Figure, Recorded, beside, cost_of, table
from speed.native import EVERY_SERVICE, Load, measure_native
from speed.processes import BENCHMARKS, TREE
from speed.run import recorded_now

from lachesis.services.run.load_costs import (
    TABLE,
    CostTable,
    Observation,
    ProcessCost,
    fit_costs,
    read_costs,
)
from lachesis.services.run.load_messages import GroupShape, rollout_bytes
from lachesis.services.run.load_settings import measure_loop

_SCENARIO = re.compile(r"(?:ours|all services) (\d+)x(\d+)\D.*?batches of (\d+), (.+)")
_GROWTH = re.compile(r"growth, to (?!1,000 )")
_GROWTH_SHAPE = (8, 16, 16)
_CPU = "CPU a group, "
_REACHED = 0.9
"""Share of its rate that a phase must reach to count."""
_BESIDE = 0.8
"""Share of the machine that others may take beside a phase that counts, where it is recorded."""
UNSEEN = (
    (Load(samples=4, tokens=2048), Phase("50/s", 240, 50.0)),
    (Load(tokens=512), Phase("150/s", 480, 150.0)),
    (Load(tokens=4096), Phase("flat out", 160)),
    (Load(samples=16, tokens=256), Phase("30/s", 160, 30.0)),
)


class PhaseCosts(NamedTuple):
    """What a phase cost: its scenario, and an observation by process. `beside`: share of the machine that others took,
    0 where it is not recorded. `counts`: whether a fit may use it.
    """

    scenario: str
    observations: list[Observation]
    beside: float
    counts: bool


def phases_of(figures: Sequence[Figure]) -> Iterator[PhaseCosts]:
    """Yield the phases of a record in which groups went through the pipeline."""
    values: dict[str, dict[tuple[str, str], float]] = {}
    for figure in figures:
        values.setdefault(figure.scenario, {})[figure.name, figure.unit] = figure.value
    for scenario, found in values.items():
        matched, rate = _SCENARIO.fullmatch(scenario), found.get(("rate", "groups/s"))
        if rate is None or not (matched or _GROWTH.match(scenario)):
            continue
        samples, tokens, batch = map(int, matched.groups()[:3]) if matched else _GROWTH_SHAPE
        phase = matched[4] if matched else "flat out"
        flat = values.get(scenario.removesuffix(phase) + "flat out", {}).get(("rate", "groups/s"), rate)
        wanted = {"half": flat / 2, "flat out": 0.0}.get(phase)
        reached = rate >= _REACHED * (float(phase.removesuffix("/s")) if wanted is None else wanted)
        others = found.get(("beside", "share"), 0.0)
        megabytes = rollout_bytes(GroupShape(samples=samples, tokens=tokens)) / 1e6
        seen = [
            Observation(
                process=name.removeprefix(_CPU), groups_per_s=rate, megabytes=megabytes, batch_groups=batch, cpu_ms=cpu,
                saturated=phase == "flat out" or not reached,
            )
            for (name, _), cpu in found.items()
            if name.startswith(_CPU)
        ]  # fmt: skip
        counts = reached and others <= _BESIDE and "environments" not in scenario
        yield PhaseCosts(scenario, seen, others, counts)


def idle_of(figures: Iterable[Figure]) -> dict[str, float]:
    """Return by process what a second of standing still takes, milliseconds."""
    return {one.name: one.value * 1e3 / 60 for one in figures if one.scenario == "standing still"}


def fit_table(recorded: Sequence[Recorded], loop_ms: float | None) -> CostTable:
    """Return the table that fits the records. Raises `ValueError` where none has a phase of the pipeline."""
    phases = [phase for record in recorded for phase in phases_of(record.figures) if phase.counts]
    seen = [one for phase in phases for one in phase.observations]
    if not seen:
        raise ValueError("no phase of the pipeline is in these records: `make bench` records some")
    idle = {name: value for record in recorded for name, value in idle_of(record.figures).items()}
    together = max(one.groups_per_s for one in seen)
    return CostTable(
        origin=[f"commit {one.commit}, {one.when}, others took {one.beside:.0%} of the machine" for one in recorded],
        machine=recorded[0].machine, together_groups_per_s=round(together, 1), loop_ms=loop_ms,
        processes=fit_costs(seen, idle, together),
    )  # fmt: skip


def predicted_ms(cost: ProcessCost, seen: Observation, together_groups_per_s: float) -> float:
    """Return what the table says of an observation, milliseconds a group."""
    lone = seen.lone(together_groups_per_s)
    return cost.per_group_ms(seen.megabytes, seen.batch_groups, lone) + cost.idle_ms / seen.groups_per_s


def compare(figures: Sequence[Figure], costs: CostTable) -> Iterator[str]:
    """Yield lines with measured and predicted processor time, by process and in all."""
    for phase in phases_of(figures):
        first = phase.observations[0]
        pace = ", saturated" if first.saturated else ""
        yield f"{phase.scenario}: {first.groups_per_s:.0f} groups/s{pace}, others took {phase.beside:.0%}"
        total = [0.0, 0.0]
        for one in phase.observations:
            said = predicted_ms(costs.processes[one.process], one, costs.together_groups_per_s)
            yield _line(one.process, one.cpu_ms, said)
            total = [total[0] + one.cpu_ms, total[1] + said]
        yield _line("in all", *total)


def _line(name: str, measured: float, predicted: float) -> str:
    return f"  {name:12} measured {measured:6.2f} ms, predicted {predicted:6.2f}, {predicted / measured - 1:+.0%}"


async def measure(out: Path) -> None:
    """Measure `UNSEEN` with every service, in turn, and write what was measured, after each."""
    figures: list[Figure] = []
    for load, phase in UNSEEN:
        warm_up = Phase("warm-up", max(8, load.batch) * 2)
        last = (await measure_native(TREE, load, [warm_up, phase], EVERY_SERVICE))[-1]
        scenario = f"all services {load}, {phase.name}"
        found = cost_of(scenario, last.before, last.after, load.samples)
        print(table(found, {}), flush=True)
        figures += [*found, Figure(scenario, "beside", "share", beside(last.before, last.after, os.cpu_count() or 1))]
        result = recorded_now(figures, beside=max(one.value for one in figures if one.name == "beside"))
        await anyio.Path(out).write_bytes(msgspec.json.format(msgspec.json.encode(result)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("fit", "check", "measure"), default="fit", nargs="?")
    parser.add_argument("file", type=Path, nargs="?")
    options = parser.parse_args()
    if options.what == "fit":
        files = [options.file] if options.file else sorted((BENCHMARKS / "recorded").glob("*.json"))
        found = fit_table([msgspec.json.decode(file.read_bytes(), type=Recorded) for file in files], measure_loop())
        TABLE.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        print(f"written to {TABLE}")
    elif options.file is None:
        parser.error(f"{options.what} needs a file")
    elif options.what == "measure":
        anyio.run(measure, options.file)
    else:
        figures = msgspec.json.decode(options.file.read_bytes(), type=Recorded).figures
        print("\n".join(compare(figures, read_costs())))


if __name__ == "__main__":
    main()
