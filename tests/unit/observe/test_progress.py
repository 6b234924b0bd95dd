import json
from pathlib import Path

from lachesis.services.observe.progress import newest_figures, progress_line, step_times
from lachesis.services.run.checkpoints import newest_checkpoint


def test_the_newest_whole_line_counts(tmp_path: Path) -> None:
    assert newest_figures(tmp_path) == {}
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"")
    assert newest_figures(tmp_path) == {}
    file.write_bytes(b'{"train/step":0.0}\n' * 9000 + b'{"train/step":1.0,"reward/mean":0.25}\n{"train/st')
    assert newest_figures(tmp_path) == {"train/step": 1.0, "reward/mean": 0.25}
    assert progress_line(newest_figures(tmp_path), 8) == "step 1/8, reward 0.25"
    assert progress_line({"train/step": 3.0}, None) == "step 3"


def test_the_newest_checkpoint_is_the_one_pointed_to(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-8\n")
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "step-8").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-8"


def test_the_log_tells_when_a_step_was_taken(tmp_path: Path) -> None:
    assert step_times(tmp_path) == {}
    steps = [
        {"train/step": n, "train/time": 1_700_000_000.5 + n, "latency/trainer/proc/p50": 0.25} for n in range(1, 9000)
    ]
    rows = [f"{json.dumps(figures)}\n" for figures in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(rows) + '{"train/time":3.0}\n')
    times = step_times(tmp_path)
    assert times[8999] == (1_700_008_999_250_000_000, 1_700_008_999_500_000_000)
    assert not {9000, 1} & times.keys()  # the first is too long ago: its report is written
