"""A real run that something keeps from training: every command says the same, and takes it back."""

import json
import os
import signal
import subprocess
from pathlib import Path

import anyio
import pytest
from integration.harness import until
from integration.standstill import inject, notices_of, open_standing_run, shown_everywhere
from integration.standstill_causes import CAUSES

from lachesis.services.observe.runs import look_at_folder

BY_NAME = {cause.name: cause for cause in CAUSES}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_stops_a_run_is_said_by_every_command_and_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    async with open_standing_run(tmp_path / "run") as standing:
        run = standing.run
        await run.wait_for_step(2)
        frozen = BY_NAME["SIGSTOP batcher"]
        os.kill(run.pids()["batcher"], signal.SIGSTOP)
        await until(lambda: any("batcher is silent" in one.what for one in notices_of(run)), 60)
        shown = await anyio.to_thread.run_sync(shown_everywhere, run, frozen.words)
        assert all(shown.values()), shown
        assert [one.source for one in look_at_folder(run.folder.name, run.folder).notices if one.stops] == ["batcher"]
        os.kill(run.pids()["batcher"], signal.SIGCONT)
        await until(lambda: not any("batcher" in one.what for one in notices_of(run)), 60)
        for name in (
            "SIGSTOP nats-server",
            "the environment's process ends",
            "supervisor has no file descriptors",
            "environment-sums has no file descriptors",
            "environment-sums has no memory",
        ):
            outcome = await inject(standing, BY_NAME[name])
            assert outcome.said_s is not None, (name, run.tail())
            assert outcome.logged_s is not None, (name, run.tail())
            assert outcome.withdrawn_s is not None, (name, run.tail())
    assert isinstance(run.process, subprocess.Popen)
    summary = json.loads((run.folder / "summary.json").read_bytes())
    past = {one["notice"]["source"]: one["until_ns"] for one in summary["notices"] if one["notice"].get("stops")}
    assert past["batcher"] is not None
    assert past["nats-server"] is not None
