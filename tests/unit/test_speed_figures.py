"""The arithmetic of `make bench`: what a group costs, who else was busy, and what has become better or worse."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def figures():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from speed import figures
    finally:
        sys.path.remove(str(BENCHMARKS))
    return figures


def snapshots(figures):
    first = figures.Snapshot(16, 10.0, {"scorer": 1.0, "governor": 0.5}, {}, 100.0)
    return first, figures.Snapshot(216, 20.0, {"scorer": 3.0, "governor": 1.5}, {}, 115.0)


def test_a_groups_cost_is_that_of_each_process_between_two_snapshots(figures):
    found = {(one.name, one.unit): one.value for one in figures.cost_of("load", *snapshots(figures), samples=8)}
    assert found == {
        ("rate", "groups/s"): 20.0,
        ("rate", "trajectories/s"): 160.0,
        ("CPU a group", "ms"): pytest.approx(15.0),
        ("CPU a group, scorer", "ms"): pytest.approx(10.0),
        ("CPU a group, governor", "ms"): pytest.approx(5.0),
    }
    first, _ = snapshots(figures)
    with pytest.raises(ValueError, match="load: no group arrived"):
        figures.cost_of("load", first, first, samples=8)


def test_what_others_took_leaves_out_the_measured_processes(figures):
    assert figures.beside(*snapshots(figures), cores=2) == pytest.approx(0.6)  # 15 busy seconds of 20, 3 of them ours


def test_a_gain_is_above_one_whichever_way_is_better(figures):
    before = [figures.Figure("ours", "rate", "groups/s", 100.0), figures.Figure("ours", "CPU a group", "ms", 5.0)]
    now = [
        figures.Figure("ours", "rate", "groups/s", 150.0),
        figures.Figure("ours", "CPU a group", "ms", 10.0),
        figures.Figure("ours", "p99", "ms", 1.0),
    ]
    gains = figures.compare(now, before)
    assert gains == {"ours: rate, groups/s": 1.5, "ours: CPU a group, ms": 0.5}
    shown = figures.table(now, gains).splitlines()
    assert shown[1].endswith("1.50 x better")
    assert shown[2].endswith("0.50 x WORSE")
    assert shown[3].endswith("ms")


def test_ratios_and_medians_are_of_what_was_measured(figures):
    rounds = [
        [figures.Figure("ours", "rate", "groups/s", value), figures.Figure("raw", "rate", "groups/s", 1000.0)]
        for value in (100.0, 400.0, 300.0)
    ]
    found = figures.median_figures(rounds)
    assert [one.value for one in found] == [300.0, 1000.0]
    assert figures.ratio(found, "ours", "raw").value == pytest.approx(0.3)
    assert figures.ratio(found, "ours", "TransferQueue") is None
