"""The benchmarks beside `lachesis plan --groups-per-s`: the fit to records, and the simulation."""

import sys
from pathlib import Path

import pytest

from lachesis.services.run.load_costs import ProcessCost, lone_share

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import load_costs
        import load_simulation
    finally:
        sys.path.remove(str(BENCHMARKS))
    return load_costs, load_simulation


def figures(costs, scenario, rate, cpu_ms, beside=0.0):
    figure = costs.Figure
    return [
        figure(scenario, "rate", "groups/s", rate), figure(scenario, "rate", "trajectories/s", 8 * rate),
        figure(scenario, "CPU a group", "ms", cpu_ms), figure(scenario, "CPU a group, scorer", "ms", cpu_ms),
        figure(scenario, "beside", "share", beside),
    ]  # fmt: skip


def recorded(costs, *groups):
    every = [one for group in groups for one in group]
    return costs.Recorded(commit="c", when="now", machine="none", versions={}, beside=0.0, figures=every)


def test_a_fit_leaves_out_what_tells_nothing_of_its_rate(benchmarks):
    costs, _ = benchmarks
    record = recorded(
        costs,
        figures(costs, "ours 8x64, batches of 16, flat out", 200.0, 1.0),
        figures(costs, "ours 8x64, batches of 16, 10/s", 10.0, 3.0),
        figures(costs, "ours 8x64, batches of 16, 100/s", 20.0, 900.0),
        figures(costs, "ours 8x64, batches of 16, half", 40.0, 900.0),
        figures(costs, "ours 8x64, 64 environments, batches of 16, flat out", 100.0, 900.0),
        figures(costs, "ours 8x64, batches of 1, flat out", 100.0, 900.0, beside=0.95),
        figures(costs, "growth, to 1,000 groups", 100.0, 900.0),
    )
    found = {phase.scenario: phase for phase in costs.phases_of(record.figures)}
    assert [name for name, phase in found.items() if phase.counts] == [
        "ours 8x64, batches of 16, flat out", "ours 8x64, batches of 16, 10/s",
    ]  # fmt: skip
    table = costs.fit_table([record], loop_ms=0.5)
    assert table.together_groups_per_s == 200.0
    said = [
        costs.predicted_ms(table.processes["scorer"], one, table.together_groups_per_s)
        for phase in found.values() if phase.counts for one in phase.observations
    ]  # fmt: skip
    assert said == pytest.approx([1.0, 3.0], rel=1e-3)
    with pytest.raises(ValueError, match="no phase of the pipeline"):
        costs.fit_table([recorded(costs)], None)


def test_lone_messages_come_out_of_the_queues_of_the_simulation(benchmarks):
    _, simulation = benchmarks
    cost = ProcessCost(group_ms=1.0, megabyte_ms=0.0, batch_ms=0.0, lone_ms=4.0)
    costs = dict.fromkeys((*simulation.PATH, "health"), cost)
    calm = simulation.simulate(costs, {}, 1.0, 500, batch=1)
    assert calm.utilisation["scorer"] == pytest.approx(0.005, rel=0.1)
    full = simulation.simulate(costs, {}, 10_000.0, 20_000, batch=1)
    assert full.groups_per_s == pytest.approx(1_000, rel=0.05)
    assert full.capacity["batcher"] == pytest.approx(1_000, rel=0.05)


def test_the_slowest_process_that_is_one_by_design_is_the_bottleneck_of_the_simulation(benchmarks):
    _, simulation = benchmarks
    cost = ProcessCost(group_ms=1.0, megabyte_ms=0.0, batch_ms=0.0, lone_ms=0.0)
    slow = ProcessCost(group_ms=3.0, megabyte_ms=0.0, batch_ms=0.0, lone_ms=0.0)
    costs = dict.fromkeys(simulation.PATH, cost) | {"scorer": slow, "batcher": slow}
    found = simulation.simulate(costs, {"scorer": 5}, 10_000.0, 3_000, batch=16)
    assert found.bottleneck == "batcher"
    assert found.groups_per_s == pytest.approx(1_000 / 3, rel=0.05)


def test_a_process_that_gathers_is_woken_once_for_what_came_in_that_time(benchmarks):
    _, simulation = benchmarks
    cost = ProcessCost(group_ms=0.1, megabyte_ms=0.0, batch_ms=0.0, lone_ms=1.0)
    gathering = ProcessCost(group_ms=0.0, megabyte_ms=0.0, batch_ms=0.0, lone_ms=1.0, gather_s=0.25)
    costs = dict.fromkeys(simulation.PATH, cost) | {"health": gathering}
    found = simulation.simulate(costs, {}, 20.0, 4_000, batch=1)
    assert found.utilisation["health"] == pytest.approx(0.02 * lone_share(20.0, 1e9, 0.25), rel=0.1)
