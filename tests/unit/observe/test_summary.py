"""What a run came to, out of the figures in its folder."""

from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.schemas.annotations import EvalEvent
from lachesis.services.observe.plots import draw_run
from lachesis.services.observe.summary import read_steps, summarize_run

STEPS = [
    {
        "train/step": float(step), "train/time": 100.0 + step, "train/sequences": 8.0, "train/tokens": 100.0,
        "reward/mean": step / 10, "reward/sums/mean": step / 10, "reward/words/mean": 0.5,
        "reward/sums/rater/numeric": 0.25, "staleness/mean": 1.0, "staleness/max": float(step % 3),
        "latency/e2e/rolling_p50": 2.0, "latency/scorer/wait/rolling_p50": 0.25, "latency/scorer/wait/rolling_p99": 0.5,
        "latency/scorer/proc/rolling_p50": 0.0, "health/sums/entropy": 1.0,
    }
    for step in range(1, 21)
]  # fmt: skip
EVENT = EvalEvent(
    run="r", env="sums", revision="live", policy_version="20-a-b", policy_step=20, items=8, k=4, temperature=1.0,
    avg=0.5, pass_at_k=0.6, started_ns=1, ended_ns=2, greedy=0.7,
)  # fmt: skip


def summary(steps: int | None, rows: list[dict[str, float]], reason: str | None = None, **more: float):
    config = RunConfig(run="r", training=TrainingConfig(steps=steps))
    return summarize_run(
        config, rows, first_step=5, started_s=90.0, wall_s=1.0, reason=reason, outcomes={"batched": 3}, evaluations=[],
        restarts={"scorer": 0, "trainer": 2}, places={"here": Path(), "gone": Path("no such folder")}, **more,
    )  # fmt: skip


def test_it_is_of_the_whole_run_with_what_is_of_the_last_start_named() -> None:
    found = summary(20, STEPS)
    totals = found.totals
    assert (found.state, found.first_step, found.step) == ("finished", 5, 20)
    assert (totals.sequences, totals.tokens) == (160, 2000)
    assert (totals.reward_first, totals.reward_last) == (pytest.approx(0.15), pytest.approx(1.95))
    assert (totals.staleness_mean, totals.staleness_max, found.end_to_end.p50) == (1.0, 2.0, 2.0)
    assert found.rewards["sums"].raters == {"numeric": 0.25}
    assert (found.restarts, list(found.places)) == ({"trainer": 2}, ["here"])
    assert found.to_first_step_s == 16.0  # the sixth, which is its first
    assert summary(20, STEPS, first_taken_s=93.0).to_first_step_s == 3.0  # a kill undid it, and it was taken again
    assert summary(20, STEPS[:5]).to_first_step_s is None
    assert summary(21, STEPS).state == summary(None, STEPS).state == "stopped"
    assert (summary(20, STEPS, "out of luck").state, summary(20, []).totals.reward_first) == ("failed", None)


def test_figures_that_are_not_needed_and_lines_that_were_torn_are_left_out(tmp_path: Path) -> None:
    lines = [msgspec.json.encode(row) + b"\n" for row in STEPS]
    torn = b'\0\0\0"train/step":2.0}\n'  # as a power loss leaves it
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:7], torn, *lines[7:], b'{"train/step":2']))
    rows = read_steps(tmp_path)
    assert len(rows) == 20
    assert rows[3] == {name: value for name, value in STEPS[3].items() if not name.startswith("health/")}
    assert read_steps(tmp_path / "none") == []


@pytest.mark.slow
def test_what_there_is_data_of_is_drawn(tmp_path: Path) -> None:
    assert [path.name for path in draw_run(tmp_path, STEPS, [EVENT])] == ["reward.png", "held_out.png", "latency.png"]
    assert draw_run(tmp_path / "none", [], []) == []
    assert not (tmp_path / "none").exists()
