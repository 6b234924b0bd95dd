"""What `lachesis up` says of a run's beginning, and leaves of its end."""

import errno
import os
import time
from pathlib import Path

import msgspec
import pytest

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.notices.changes import PastNotice
from lachesis.schemas.notices import Notice
from lachesis.services.observe import run_record
from lachesis.services.observe.run_record import RunSummaryWriter


class _State:
    step = 40


GO_ON = "go on: lachesis up --run r"


def record(
    folder: Path, steps: int | None, monkeypatch: pytest.MonkeyPatch, *, resumes: bool = True
) -> RunSummaryWriter:
    monkeypatch.setattr(run_record, "latest_checkpoint", lambda folder: folder / "step-00000040" if resumes else None)
    monkeypatch.setattr(run_record, "state_of", lambda _: _State)
    return RunSummaryWriter(RunConfig(run="r", folder=str(folder), training=TrainingConfig(steps=steps)))


def trained(folder: Path, steps: int) -> None:
    """Write the figures of `steps` steps into the folder of a run, all 7 s from now."""
    at = time.time() + 7.0
    rows = [{"train/step": float(step), "train/time": at, "reward/mean": step / 100} for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def test_a_start_says_from_which_step_to_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = tmp_path / "checkpoints" / "step-00000040"
    texts = [record(tmp_path, steps, monkeypatch).describe_start() for steps in (100, None, 40)]
    assert texts == [
        f"resumes at step 40, from {at}, and trains to step 100",
        f"resumes at step 40, from {at}, and trains until it is stopped",
        f"resumes at step 40, from {at}: all 40 steps are taken, so nothing is trained; raise training.steps to go on",
    ]
    assert record(tmp_path, 100, monkeypatch, resumes=False).describe_start() == "trains from step 0 to step 100"


@pytest.mark.slow
def test_an_end_leaves_a_summary_and_plots_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = record(tmp_path, 100, monkeypatch)
    trained(tmp_path, 50)
    said = list(one.conclude([], [], {"trainer": 1}))
    assert said[0].startswith("run r stopped, from step 40 to 50 of 100 in ")
    assert said[0].endswith(" s, the first step after 7.0 s; reward 0.03 at first, 0.48 at last")
    assert said[1:] == [f"summary in {tmp_path / 'summary.json'}, plots in {tmp_path / 'plots'}", GO_ON]
    written = msgspec.json.decode((tmp_path / "summary.json").read_bytes())
    assert (written["state"], written["restarts"]) == ("stopped", {"trainer": 1})
    assert (tmp_path / "plots" / "reward.png").is_file()
    assert "failed" in next(iter(one.conclude([], [], {}, "no server")))


def test_an_end_after_too_few_steps_for_a_curve_draws_none_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, 9)
    said = list(record(tmp_path, 100, monkeypatch).conclude([], [], {}))
    assert said[1:] == [f"summary in {tmp_path / 'summary.json'}; plots are drawn from 10 steps on", GO_ON]
    assert not (tmp_path / "plots").exists()
    assert "plots" not in msgspec.json.decode((tmp_path / "summary.json").read_bytes())["places"]


def test_an_end_names_what_the_model_went_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large steps and health warnings, also those that are over; of other troubles those that hold to the end."""

    def past(source: str, key: str, what: str, until_ns: int | None) -> PastNotice:
        return PastNotice(notice=Notice(key=key, source=source, what=what), until_ns=until_ns)

    notices = [
        past("trainer", "step", "step 1: KL .18", 5),
        past("trainer", "step", "step 2: KL .15", 7),
        past("health", "sums collapse", "environment sums: collapse", None),
        past("health", "sums truncated", "environment sums: truncated", 8),
        past("scorer", "waits", "scorer is waiting", 9),
    ]
    said = list(record(tmp_path, 100, monkeypatch).conclude([], [], {}, None, notices))
    assert [line for line in said if line.startswith(("in the end", "during"))] == [
        "in the end: health: environment sums: collapse",
        "during the run: trainer: step 2: KL .15",
        "during the run: health: environment sums: truncated",
    ]


def test_an_end_does_not_wait_for_room_and_leaves_no_summary_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record(tmp_path, 100, monkeypatch)
    trained(tmp_path, 10)
    assert "summary in" in list(one.conclude([], [], {}))[1]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", full)
    headline, *said = one.conclude([], [], {})
    assert headline.startswith("run r stopped")
    assert [line.partition(": the disk is full, at least ")[0] for line in said] == [
        f"no summary in {tmp_path / 'summary.json'}", f"no plots in {tmp_path / 'plots'}", GO_ON,
    ]  # fmt: skip
    assert not (tmp_path / "summary.json").exists()
    assert not list(tmp_path.rglob("*partial*"))
