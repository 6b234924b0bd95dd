"""The real atroposlib without HTTP: a class of its users in a process of its own, trained on across kills.

`make atropos` installs the library beside us and runs this: ATROPOS_PYTHON names an interpreter that has it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

PYTHON = os.environ.get("ATROPOS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="atroposlib is not installed; `make atropos` installs it and runs this"),
]
TESTS = Path(__file__).parents[2]
CONFIG = """
run = "native"
model = "model"
[environments.spelling]
kind = "atropos"
samples = 8
longest_tokens = 96
max_new_tokens = 12
concurrency = 4
[environments.spelling.params]
place = "{tests}/integration/gateway/atropos_near.py:Near"
python = "{python}"
settings = {{ tokenizer_name = "model" }}
[batching]
batch_size = 32
[evaluate]
held_out = 0
[training]
steps = 8
"""
STARTED = re.compile(r"started, pid (\d+)")
READY = re.compile(r"its process (\d+) is ready")


@pytest.mark.timeout(540)
def test_a_class_is_trained_on_with_exact_logprobs_across_kills_of_its_process_policy_and_broker(
    tmp_path: Path,
) -> None:
    save_policy(build_tiny_policy(0, width=64, layers=1, heads=2, max_length=128), tmp_path / "model")
    (tmp_path / "run.toml").write_text(CONFIG.format(tests=TESTS, python=PYTHON))
    run = tmp_path / "runs" / "native"
    log, metrics = run / "logs" / "environment-spelling.log", run / "metrics.jsonl"
    environ = {**os.environ, "PYTHONPATH": str(TESTS / "examples"), "HF_HUB_OFFLINE": "1"}
    killed: list[int] = []

    def victim(after: int) -> int:
        """Return what is killed after so many steps: the class' process, the policy's server, the broker."""
        if after == 2:
            (pid,) = map(int, READY.findall(log.read_text()))
            return pid
        if after == 3:
            return int(STARTED.findall((run / "logs" / "inference-policy.log").read_text())[-1])
        return int(json.loads((run / "pids.json").read_text())["nats-server"])

    with (tmp_path / "up.log").open("ab") as sink:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        up = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=tmp_path, env=environ)
    try:
        while up.poll() is None:
            done = metrics.read_text().count("\n") if metrics.exists() else 0
            if len(killed) < 3 and done >= len(killed) + 2:
                killed.append(victim(len(killed) + 2))
                os.kill(killed[-1], signal.SIGKILL)
            time.sleep(0.1)
    finally:
        if up.poll() is None:
            up.terminate()
            up.wait()
    said = (tmp_path / "up.log").read_text()
    assert up.returncode == 0, said[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(steps) == 8
    assert steps[0]["logprobs/diff"] < 1e-4, "tokens or logprobs are not those that were sampled"
    pids = [int(pid) for pid in READY.findall(log.read_text())]
    assert len(killed) == 3
    assert pids[:1] == killed[:1]
    assert len(pids) == 2, "another process took its place, once"
    assert len(STARTED.findall(log.read_text())) == 1, "the environment's service outlived policy and broker"
    assert f"{killed[0]} ended (killed by signal 9)" in log.read_text()
    with pytest.raises(ProcessLookupError):  # nothing outlives the run
        os.kill(pids[1], 0)
