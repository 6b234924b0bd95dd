"""wandb's own client, without a server: its project's name, and one run in the folders of several lives."""

import json
import logging
import shutil
import subprocess
import sys
import time
from itertools import chain

import msgspec
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from lachesis.pipeline.common.disk import DiskRoom
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.extensions.wandb import place_of
from lachesis.pipeline.extensions.wandb.config import WandbConfig
from lachesis.pipeline.extensions.wandb.files import records, stored_step
from lachesis.pipeline.extensions.wandb.tracker import WandbTracker
from lachesis.schemas.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"project": "p"}, (None, "p")),
        ({"project": "team/p"}, ("team", "p")),
        ({"project": "p", "entity": "team"}, ("team", "p")),
        ({"project": "team/p", "entity": "team"}, ("team", "p")),
    ],
)
def test_a_project_may_name_its_entity(given, place, tmp_path):
    config = WandbConfig(**given)
    assert config.place() == place
    arguments = WandbTracker(config, "run", tmp_path, {})._arguments
    assert (arguments["entity"], arguments["project"]) == place


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"project": "a/b/c"}, "more parts than"),
        ({"project": " "}, "blanks at its ends"),
        ({"project": "team/p "}, "blanks at its ends"),
        ({"project": "a%b"}, "without any of"),
        ({"project": "team/a:b"}, "without any of"),
        ({"project": "team/"}, "without any of"),
        ({"project": "/p"}, "without any of"),
        ({"project": ""}, "without any of"),
        ({"project": "p" * 129}, "at most 128"),
        ({"project": "team/p", "entity": "other"}, "leave one out"),
    ],
)
def test_a_project_that_wandb_refuses_is_refused_before(given, said):
    with pytest.raises(ConfigError, match=said):
        WandbConfig(**given)


def test_what_an_earlier_life_has_is_not_written_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged = []

    class Run:
        def define_metric(self, *_, **__):
            pass

        dir = tmp_path / "wandb" / "offline-run" / "files"

        def log(self, figures, step):
            logged.append((step, figures))

    tracker = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    monkeypatch.setattr(tracker._wandb, "init", lambda **_: Run())
    (tmp_path / "wandb").mkdir()
    tracker.open(0)
    for step in (1, 2, 3):
        tracker.log_figures({"train/step": float(step), "a": 1.0}, step)
    tracker.log_figures({"eval": 1.0}, 3)
    again = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    with caplog.at_level(logging.INFO, "lachesis"):
        again.open(1)  # killed after the checkpoint of step 1
    for step in (2, 3, 4):
        again.log_figures({"train/step": float(step), "a": 2.0}, step)
    assert [(step, figures.get("a")) for step, figures in logged] == [(1, 1.0), (2, 1.0), (3, 1.0), (3, None), (4, 2.0)]
    assert "from step 4 on: `wandb sync` the oldest first, and the others with --append" in caplog.text


def test_wandb_keeps_its_files_where_its_own_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert f"kept in {tmp_path}/wandb" in WandbTracker(WandbConfig(project="p"), "run", tmp_path, {}).check()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "mine"))
    tracker = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    assert f"kept in {tmp_path}/mine/wandb" in tracker.check()
    assert tracker._last_step_file.parent == tmp_path / "mine" / "wandb"
    (tmp_path / "file").touch()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "file"))  # wandb itself would keep the run in /tmp
    tracker = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    for attempt in (tracker.check, lambda: tracker.open(0)):
        with pytest.raises(InfrastructureError, match="is no folder to write to"):
            attempt()


@pytest.mark.parametrize("variable", [False, True])
def test_a_summary_names_the_folder_of_its_own_offline_run(tmp_path, monkeypatch, variable):
    config = msgspec.convert({"run": "r", "folder": str(tmp_path)}, run_config_type())
    if variable:
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / "mine"))
    kept = (tmp_path / "mine" if variable else config.path) / "wandb"
    assert place_of(config) == "None/r"
    for name in ("offline-run-20270101_000000-r", "offline-run-20270102_000000-r", "offline-run-20270103_000000-other"):
        (kept / name).mkdir(parents=True)
    assert place_of(config) == str(kept / "offline-run-20270102_000000-r")


def test_what_wandb_says_of_settings_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    assert tracker.check() == f"project p; WANDB_MODE=offline, kept in {tmp_path}/wandb for `wandb sync`"
    tracker._arguments["project"] = "a/b"
    with pytest.raises(DataError, match="Invalid project name"):
        tracker.check()
    with pytest.raises(DataError, match="Invalid project name"):
        tracker.open(0)


LIFE = """
import json, os, pathlib, signal, sys
from lachesis.pipeline.extensions.wandb.config import WandbConfig
from lachesis.pipeline.extensions.wandb.tracker import WandbTracker
folder, first, last = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tracker = WandbTracker(WandbConfig(project="p"), "run", folder, {})
tracker.open(first - 1)
with (folder / "metrics.jsonl").open("a") as rows:
    for step in range(first, last + 1):
        figures = {"train/step": float(step), "a": float(step), "text": "x" * 700}
        rows.write(json.dumps(figures) + chr(10))
        tracker.log_figures(figures, step)
if sys.argv[4] == "killed":
    rows.close()
    os.killpg(0, signal.SIGKILL)
tracker.close()
"""
"""One life of a trainer; wandb's own process dies with it, as under the supervisor."""


def steps_in(file):
    found = []
    for data in records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append(int(record.history.step.num))
    return found


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.parametrize(
    "lives", [((1, 90, "killed"), (91, 95, "ends")), ((1, 5, "killed"), (6, 7, "killed"), (8, 9, "ends"))]
)
def test_a_killed_trainer_leaves_one_run_of_contiguous_steps(tmp_path, monkeypatch, lives):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last, end in lives:
        done = subprocess.run(
            [sys.executable, "-c", LIFE, str(tmp_path), str(first), str(last), end],
            process_group=0, check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == (-9 if end == "killed" else 0)
    files = sorted((tmp_path / "wandb").glob("offline-run-*-run/run-run.wandb"), key=lambda one: one.stat().st_mtime)
    steps = [steps_in(file) for file in files]
    assert len(steps) == len(lives)
    assert steps[0][-1:] < [lives[0][1]], "wandb had not written all of it"
    assert [*chain.from_iterable(steps)] == list(range(1, lives[-1][1] + 1))


@pytest.mark.outside
@pytest.mark.slow
def test_a_folder_that_is_deleted_is_reported_and_begun_anew_with_all_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WandbTracker(WandbConfig(project="p"), "run", tmp_path, {})
    tracker.open(0)

    def log(step):
        figures = {"train/step": float(step), "a": float(step)}
        with (tmp_path / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps(figures) + "\n")
        tracker.log_figures(figures, step)

    for step in (1, 2):
        log(step)
    while (tmp_path / "wandb").exists():  # wandb's own process may write into it meanwhile
        shutil.rmtree(tmp_path / "wandb", ignore_errors=True)
    with pytest.raises(InfrastructureError, match="was deleted or moved"):
        log(3)
    tracker.log_figures({"train/step": 3.0, "a": 3.0}, 3)  # as the outbox tries again
    with monkeypatch.context() as full:
        full.setattr("lachesis.pipeline.extensions.wandb.tracker.disk_room", lambda _: DiskRoom(0, 1 << 30))
        with pytest.raises(InfrastructureError, match="the disk is full"):
            log(4)
    tracker.log_figures({"train/step": 4.0, "a": 4.0}, 4)
    tracker.close()
    (file,) = tmp_path.glob("wandb/offline-run-*-run/run-run.wandb")
    late = time.monotonic() + 30
    while not steps_in(file) and time.monotonic() < late:  # which writes the rest after its client has ended, too
        time.sleep(0.05)
    assert steps_in(file) == [1, 2, 3, 4]


def test_what_is_no_file_of_wandbs_says_nothing(tmp_path):
    assert stored_step(tmp_path, "run") is None
    file = tmp_path / "offline-run-1-run" / "run-run.wandb"
    file.parent.mkdir()
    for content, step in ((b"", 0), (b":W&B" + bytes(40), 0), (bytes(range(256)) * 300, None)):
        file.write_bytes(content)
        assert stored_step(tmp_path, "run") == step
