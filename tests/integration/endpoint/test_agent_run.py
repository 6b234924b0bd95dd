"""A stranger's agent, a loop with two tools over plain HTTP, trained by `lachesis up` across a kill."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

pytestmark = [pytest.mark.slow, pytest.mark.extension]

AGENT = Path(__file__).parents[2] / "unit/extensions/endpoint/agent_program.py"
CONFIG = """
run = "agents"
model = "model"
[environments.words]
kind = "agent"
samples = 4
longest_tokens = 512
max_new_tokens = 12
concurrency = 2
[environments.words.params]
command = ["{python}", "agent.py", "--reward"]
folder = "."
path = "tasks.jsonl"
reward = "program"
[batching]
batch_size = 8
[evaluate]
held_out = 0
[training]
steps = 3
"""


@pytest.mark.timeout(540)
def test_an_agent_that_knows_a_base_url_alone_is_trained_across_a_kill_of_its_environment(tmp_path: Path) -> None:
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=512), tmp_path / "model")
    shutil.copy(AGENT, tmp_path / "agent.py")
    tasks = [{"prompt": f"Say {letter}", "answer": letter} for letter in "abcdefgh"]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "run.toml").write_text(CONFIG.format(python=sys.executable))
    run, killed = tmp_path / "runs" / "agents", False
    with (tmp_path / "up.log").open("ab") as sink:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        up = subprocess.Popen(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        while up.poll() is None:  # the test's own limit ends it
            metrics = run / "metrics.jsonl"
            if not killed and metrics.exists() and '"train/step":1' in metrics.read_text():
                os.kill(int(json.loads((run / "pids.json").read_text())["environment-words"]), 9)
                killed = True
            time.sleep(0.2)
    finally:
        up.terminate()
        up.wait()
    text = (tmp_path / "up.log").read_text()
    assert up.returncode == 0, text
    assert killed
    assert '"train/step":3' in (run / "metrics.jsonl").read_text()
