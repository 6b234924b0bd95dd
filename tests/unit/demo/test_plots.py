"""The demo's pictures: what a reader would take them for."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.demo.test_summary import CONFIG, summary

from lachesis.services.demo.observed import DrawnGroup, RunObservation
from lachesis.services.demo.plots import draw_plots, smoothed
from lachesis.services.observe.services import Quantiles, ServiceStatus


def test_difficulty_is_smoothed_over_the_steps_nearby() -> None:
    noisy = {step: [float(step), float(step + 10 * (-1) ** step)] for step in range(101)}
    points = dict(smoothed(noisy))
    assert list(points) == list(range(101))
    steps = list(points.values())
    assert max(abs(b - a) for a, b in itertools.pairwise(steps)) < 3, "raw, it jumps by 11"
    assert points[50] == pytest.approx(50, abs=1)
    assert smoothed({}) == []
    assert smoothed({3: [1.0, 2.0]}) == [(3, 1.5)]


def test_a_step_with_many_groups_weighs_as_many() -> None:
    assert dict(smoothed({0: [0.0], 1: [1.0, 1.0, 1.0]}))[0] == 0.75


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures by the name of their file."""
    figures: dict[str, Any] = {}
    from matplotlib.figure import Figure

    save = Figure.savefig

    def keep(figure: Any, path: Path, **settings: Any) -> None:
        figures[path.stem] = figure
        save(figure, path, **settings)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.slow
def test_no_log_axis_begins_at_0_and_nothing_is_drawn_from_there(drawn: dict[str, Any], tmp_path: Path) -> None:
    observed = RunObservation(CONFIG)
    observed.drawn = {str(n): DrawnGroup(n, 0, 0.5) for n in range(30)}
    seen = summary(observed)
    waits = Quantiles(1e-4, 2e-4, 1e-3)
    services = [
        ServiceStatus(service="scorer", state="ok", wait=waits, process=Quantiles(0.01, 0.02, 0.1)),
        ServiceStatus(service="batcher", state="ok", process=Quantiles(0.0, 0.0, 0.5)),
    ]
    found = msgspec.structs.replace(seen, run=msgspec.structs.replace(seen.run, services=services))
    draw_plots(tmp_path, found, observed, [], [3.0])
    (axes,) = drawn["latency"].axes
    assert axes.get_xscale() == "log"
    assert axes.get_xlim()[0] > 0
    lengths = [x for lines in axes.collections for (x, _), _ in lines.get_segments()]
    assert sorted(lengths) == [1e-4, 0.01]
    assert not axes.patches, "a bar begins at 0"


@pytest.mark.slow
def test_what_has_no_data_is_drawn_empty(drawn: dict[str, Any], tmp_path: Path) -> None:
    observed = RunObservation(CONFIG)
    draw_plots(tmp_path, summary(observed), observed, [], [])
    assert (
        sorted(drawn)
        == ["difficulty", "held_out", "latency", "reward", "teacher"]
        == sorted(file.stem for file in tmp_path.glob("*.png"))
    )
