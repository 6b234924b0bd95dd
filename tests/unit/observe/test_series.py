"""Curves out of the log of figures: which figure goes to which chart, and how many there are at most."""

from pathlib import Path

import msgspec

from lachesis.services.observe.series import MAX_POINTS, CurveReader, chart_values


def written(folder: Path, rows: list[dict[str, float]]) -> CurveReader:
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return CurveReader(folder)


def test_each_environment_has_a_chart_of_its_raters() -> None:
    figures = {"train/step": 3.0, "reward/sums/rater/exact": 0.5, "reward/sums/rater/my/judge": 0.9, "reward/mean": 0.7}
    assert list(chart_values(figures)) == [
        ("ratings/sums", "exact", 3.0, 0.5), ("ratings/sums", "my/judge", 3.0, 0.9), ("reward", "all", 3.0, 0.7),
    ]  # fmt: skip
    assert list(chart_values({"reward/sums/rater/exact": 0.5})) == []  # of no step


def test_points_lines_and_charts_are_bounded(tmp_path: Path) -> None:
    steps = [{"train/step": float(step), "reward/mean": float(step)} for step in range(1, 4 * MAX_POINTS)]
    raters = {f"reward/e{env}/rater/r{rater}": 1.0 for env in range(50) for rater in range(20)}
    charts = written(tmp_path, [*steps, {"train/step": 5000.0, **raters}]).read()
    assert len(charts) == 32
    assert max(len(chart.lines) for chart in charts) == 12
    (reward,) = [chart for chart in charts if chart.name == "reward"]
    assert len(reward.lines[0].points) <= MAX_POINTS
    (_, first), (_, last) = reward.lines[0].points[0], reward.lines[0].points[-1]
    assert first < last
