"""The demo from end to end, very short: on a path with a space, without a terminal, leaving nothing running."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.model.policy import load_model
from lachesis.services.planned_processes import planned_processes
from lachesis.services.run.deletion import MODEL_MARK
from lachesis.services.run.run_file import RUN_FILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PLOTS = {"reward.png", "held_out.png", "difficulty.png", "latency.png", "teacher.png"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lachesis", "demo", "--run", "smoke", "--folder", str(folder), "--no-gate"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder.parent.parent / "cache")}
    return subprocess.Popen(
        [*command, "--steps", "3", "--set", "evaluate.items=8", "--set", "evaluate.items_between=8", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )


def finish(demo: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = demo.communicate(timeout=1150)
    return demo.returncode, output


def left_running(folder: Path) -> list[list[str]]:
    """Processes whose command line or working directory names the run's folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in command):
            found.append(command)
    return found


def wait_for(condition: Callable[[], Any], demo: subprocess.Popen[str]) -> Any:
    for _ in range(4000):
        if found := condition():
            return found
        assert demo.poll() is None, finish(demo)
        time.sleep(0.1)
    raise AssertionError("it never came to that")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path with a space, beside a cache that the tests of this module share."""
    return tmp_path_factory.mktemp("a demo") / "the run"


def test_a_short_demo_runs_to_its_end(folder: Path) -> None:
    code, output = finish(start(folder))
    assert code == 0, output
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert summary["state"] == "finished"
    assert summary["step"] == 3
    assert summary["sequences"] >= 3 * 128 == 384
    assert summary["gate"]["before"] is not None
    assert summary["gate"]["after"] is not None
    assert summary["gate"]["passed"] is None
    assert summary["dead_letters"] == 0
    pids = [pid for row in summary["services"] for pid in row["pids"]]
    planned = planned_processes(load(run_config_type(), file=folder / RUN_FILE, environ={}).config)
    restarts = sum(count for name, count in summary["restarts"].items() if name != "supervisor")
    assert len(pids) == len(set(pids)) == len(planned) + restarts, "every service is a process of its own"
    assert {path.name for path in (folder / "plots").iterdir()} == PLOTS
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (folder / "plots").iterdir())
    assert "step 3/3" in output
    assert "\x1b[" not in output
    assert not left_running(folder)
    assert (Path(summary["places"]["trained"]) / "model.safetensors").is_file()


def test_the_model_is_saved_without_a_run_and_never_over_another(folder: Path) -> None:
    target = folder.parent / "models" / "tiny"
    code, output = finish(start(folder, "--save-model", str(target)))
    assert code == 0, output
    assert load_model(str(target)).model.num_parameters() > 100_000
    assert not (target / MODEL_MARK).exists()
    assert sorted(target.parent.iterdir()) == [target]
    assert not folder.exists()
    code, output = finish(start(folder, "--save-model", str(target)))
    assert code == 2
    assert "exists already" in output


def test_a_killed_supervisor_is_started_again(folder: Path) -> None:
    demo = start(folder, "--steps", "12")  # so many that it is not over before the kill
    pids = folder / "pids.json"

    def supervisor() -> int | None:
        trained = (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size
        return msgspec.json.decode(pids.read_bytes())["supervisor"] if trained else None

    os.kill(wait_for(supervisor, demo), signal.SIGKILL)
    code, output = finish(demo)
    assert code == 0, output
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert summary["state"] == "finished"
    assert summary["step"] == 12
    assert summary["restarts"]["supervisor"] == 1
    assert not left_running(folder)


def test_an_interrupted_demo_drains_and_says_what_it_saw(folder: Path) -> None:
    demo = start(folder, "--set", "training.steps=1000")
    wait_for(lambda: (folder / "metrics.jsonl").is_file() and (folder / "metrics.jsonl").stat().st_size, demo)
    demo.send_signal(signal.SIGINT)
    code, output = finish(demo)
    assert code == 130, output
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert summary["state"] == "interrupted"
    assert summary["step"] >= 1
    assert not left_running(folder)


def test_a_taken_port_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = finish(start(folder, "--set", f"server.port={port}"))
    assert code == 1
    assert f"server.port {port} is taken on 127.0.0.1 by another program" in output
    assert "Traceback" not in output
    assert not left_running(folder)


def test_the_policy_comes_nearer_to_a_better_teacher(folder: Path) -> None:
    """On-policy distillation through every service; the plot is among the run's."""
    code, output = finish(start(folder, "--distill", "--deadline", "1100", "--steps", "30"))
    assert code == 0, output
    summary = msgspec.json.decode((folder / "summary.json").read_bytes())
    assert (summary["state"], summary["step"]) == ("finished", 30)
    teacher = summary["teacher"]
    assert teacher["after"] < 0.9 * teacher["before"], teacher
    assert f"KL to it {teacher['before']:.2f} -> {teacher['after']:.2f} nats a token" in output
    assert (folder / "plots" / "teacher.png").stat().st_size > 0
