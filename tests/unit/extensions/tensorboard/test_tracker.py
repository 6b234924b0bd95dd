"""TensorBoard's own reader finds each figure once, also after a trainer went back to a checkpoint."""

import pytest

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.tensorboard.tracker import TensorBoardTracker
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.trainer.samples import ReadableSample

ALERT = AlertNotification(
    run="r", revision="live", environment="sums", seq=7, window=1, groups=64, standing="halted", changes=[],
    text="run r, environment sums: halted",
)  # fmt: skip


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_figures_samples_and_alerts_are_read_back(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "tb")
    tracker.open(0)
    for step in (1, 2, 3):
        tracker.log_figures({"train/loss": step / 10, "eval/sums/rate": 0.5}, step)
    tracker.log_samples([ReadableSample("item7", "1+1=", "2", 0.5)], 3)
    tracker.log_alert(ALERT, 3)
    tracker.close()
    events = read(tmp_path / "tb")
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars("train/loss")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "item7" in texts["samples/0/text_summary"]
    assert "1+1=" in texts["samples/0/text_summary"]
    assert "sums: halted" in texts["alerts/sums/text_summary"]


def test_steps_after_the_checkpoint_are_purged_and_come_again(tmp_path):
    first = TensorBoardTracker(tmp_path)
    first.open(0)
    for step in (1, 2, 3):
        first.log_figures({"train/loss": 0.0}, step)
    first.close()
    again = TensorBoardTracker(tmp_path)
    again.open(2)
    again.log_figures({"train/loss": 1.0}, 3)
    again.close()
    assert [(e.step, e.value) for e in read(tmp_path).Scalars("train/loss")] == [(1, 0.0), (2, 0.0), (3, 1.0)]


def test_a_disk_that_cannot_be_written_is_named_and_tried_again(tmp_path):
    (tmp_path / "taken").write_text("a file where the folder should be")
    tracker = TensorBoardTracker(tmp_path / "taken")
    with pytest.raises(InfrastructureError, match="taken cannot be written"):
        tracker.open(0)
    (tmp_path / "taken").unlink()
    tracker.open(0)
    tracker.log_figures({"train/loss": 1.0}, 1)
    tracker.close()
    assert len(read(tmp_path / "taken").Scalars("train/loss")) == 1
