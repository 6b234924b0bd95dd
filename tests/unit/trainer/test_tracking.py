"""Figures over restarts: each step is in the file once, whatever a life before had written."""

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.trainer import tracking as tracking_module
from lachesis.pipeline.trainer.tracking import METRICS_FILE, open_tracking


@pytest.fixture
def config(tmp_path):
    return RunConfig(folder=str(tmp_path))


def figures(step, loss=0.0):
    return {"train/step": float(step), "train/loss": loss}


def steps(config):
    rows = (config.path / METRICS_FILE).read_bytes().splitlines()
    return [(int(row["train/step"]), row["train/loss"]) for row in map(msgspec.json.decode, rows)]


async def resumed(config, step):
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        await tracking.resume(step)


async def test_steps_after_the_checkpoint_are_cut_off_and_come_again(config):
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        await tracking.resume(0)
        for step in range(1, 6):
            await tracking.log(figures(step))
    with (config.path / METRICS_FILE).open("ab") as file:
        file.write(b'{"train/step": 6.0, "train/lo')  # killed while it wrote
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        await tracking.resume(4)
        assert steps(config) == [(step, 0.0) for step in range(1, 5)]
        for step in (5, 6):
            await tracking.log(figures(step, 1.0))
    assert steps(config) == [(step, 0.0) for step in range(1, 5)] + [(5, 1.0), (6, 1.0)]


async def test_a_line_that_ends_in_the_middle_does_not_spoil_the_next_one(config):
    (config.path / METRICS_FILE).write_bytes(b'{"train/step":1.0,"train/loss":0.0}\n{"train/step":2.0')
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        await tracking.resume(2)  # the checkpoint is newer than what the figures say
        await tracking.log(figures(3))
    assert steps(config) == [(1, 0.0), (3, 0.0)]


async def test_a_kill_while_it_is_cut_leaves_the_old_file_or_the_new_one(config, monkeypatch):
    async with open_tracking(config.path, config.training.sample_rows) as tracking:
        for step in range(1, 4):
            await tracking.log(figures(step))
    before = (config.path / METRICS_FILE).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        await resumed(config, 1)
    assert (config.path / METRICS_FILE).read_bytes() == before


class AwayTracker:
    """A tracker whose server does not answer: none can be had that is away for certain."""

    name = "away"

    def open(self, step):
        raise InfrastructureError("nobody answers")

    def log_figures(self, figures, step):
        raise AssertionError("it was never open")


async def test_what_a_tracker_did_not_get_until_the_end_is_said(config, monkeypatch, caplog):
    monkeypatch.setattr(tracking_module, "CLOSE_S", 0.0)
    async with open_tracking(config.path, config.training.sample_rows, [AwayTracker()]) as tracking:
        await tracking.resume(0)
        await tracking.log(figures(1))
    assert "away was away or too slow at the end, so up to 2 entries were not sent; metrics.jsonl holds" in caplog.text
