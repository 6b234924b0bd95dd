"""Two environments on the real atroposlib, unmodified, from a run's start to better answers, across kills.

`make atropos` installs the library beside us and runs this: ATROPOS_PYTHON names an interpreter that has it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from statistics import mean

import pytest

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup
from lachesis.services.demo.prepare import cache_folder, prepare
from lachesis.services.demo.settings import DemoOptions, demo_config
from lachesis.services.run.connect import open_history

PYTHON = os.environ.get("ATROPOS_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="atroposlib is not installed; `make atropos` installs it and runs this"),
]
STEPS = 32
ENVIRONMENTS = {"spelling": 8, "short": 4}
"""The group size of each. Their weights in a batch are three to one."""
CONFIG = """
run = "stock"
model = "model"
[environments.spelling]
kind = "gateway"
samples = 8
longest_tokens = 96
[environments.short]
kind = "gateway"
samples = 4
longest_tokens = 96
[gateway]
port = {gateway}
[inference.policy]
port = {policy}
[batching]
batch_size = 64
mix = {{ spelling = 3.0, short = 1.0 }}
[training]
steps = {steps}
[training.learner]
learning_rate = 6e-4
warmup_steps = 0
"""
KILLS = ((4, "gateway"), (8, "inference-policy"), (12, "nats-server"), (16, "gateway"))
"""After so many steps that process is killed."""


@pytest.mark.timeout(540)
async def test_stock_environments_learn_in_their_shares_across_kills_of_gateway_policy_and_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = _run_across_kills(tmp_path)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["train/step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[0]["logprobs/diff"] < 1e-3, "tokens or logprobs are not those that were sampled"
    shares, groups = await _history(load(run_config_type(), file=run / "run.toml").config)
    print("sequences trained:", dict(shares))
    assert shares["spelling"] > 1.2 * shares["short"] > 0, "a share that stays empty for a moment goes to the others"
    third = len(groups) // 3
    rates = [mean(map(_pass_rate, part)) for part in (groups[:third], groups[-third:])]
    print(f"pass rate of the first and the last third of {len(groups)} groups: {rates[0]:.3f}, {rates[1]:.3f}")
    assert rates[1] > rates[0] + 0.04
    assert len({(group.producer, group.epoch, group.counter) for group in groups}) == len(groups)
    # a word may be drawn twice and answered alike, but by newer weights
    rows = [(b"".join(s.tokens.tobytes() + s.logprobs.tobytes() for s in group.sequences)) for group in groups]
    assert len(set(rows)) == len(rows), "what a client sent again is stored once"


def _run_across_kills(tmp_path: Path) -> Path:
    """Run the environments against `lachesis up` to its last step; return the run's folder."""
    demo = demo_config(DemoOptions(folder=tmp_path / "demo"))
    shutil.copytree(prepare(demo, cache_folder(os.environ, tmp_path / "cache")).folder, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        gateway, policy = one.getsockname()[1], other.getsockname()[1]
    run = tmp_path / "runs" / "stock"
    (tmp_path / "run.toml").write_text(CONFIG.format(gateway=gateway, policy=policy, steps=STEPS))
    server = f"{{model_name: model, base_url: 'http://127.0.0.1:{policy}/v1', server_type: vllm, api_key: any}}"
    for name, samples in ENVIRONMENTS.items():
        env = f"env: {{wandb_name: {name}, group_size: {samples}, ensure_scores_are_not_same: false}}"
        (tmp_path / f"{name}.yaml").write_text(f"{env}\nopenai: [{server}, {server}]\n")
    environments: list[subprocess.Popen[bytes]] = []
    killed: list[str] = []
    with (tmp_path / "up.log").open("ab") as sink:
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
        up = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=tmp_path)
    try:
        while up.poll() is None:
            if not environments and (run / "gateway.url").exists():
                url = (run / "gateway.url").read_text().strip()
                environments = [_serve(tmp_path, name, url) for name in ENVIRONMENTS]
            done = _steps(run)
            if done < STEPS:
                for name, environment in zip(ENVIRONMENTS, environments, strict=False):
                    said = (tmp_path / f"{name}.log").read_text()
                    assert environment.poll() is None, f"after {done} steps and kills of {killed}:\n{said[-3000:]}"
                    assert "Failed to send" not in said, "a group was dropped by its client"
            if len(killed) < len(KILLS) and done >= KILLS[len(killed)][0]:
                killed.append(KILLS[len(killed)][1])
                os.kill(json.loads((run / "pids.json").read_bytes())[killed[-1]], signal.SIGKILL)
            time.sleep(0.1)
        assert up.returncode == 0, (tmp_path / "up.log").read_text()[-3000:]
    finally:
        for process in (up, *environments):
            if process.poll() is None:
                process.terminate()
                process.wait()
    assert killed == [name for _, name in KILLS]
    return run


def _steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _pass_rate(group: RolloutGroup) -> float:
    (scores,) = group.sequences.rewards.values()
    return mean(score or 0.0 for score in scores)


async def _history(config: RunConfig) -> tuple[Counter[str], list[RolloutGroup]]:
    """Return how many sequences of each environment were in batches, and all stored groups.

    Asserts that no group has two outcomes.
    """
    shares, settled = Counter[str](), set[int]()
    async with open_history(config, "tests") as bus:
        async with aclosing(follow_ledger(bus, config.run, "main", LedgerPosition(), follow=False)) as entries:
            async for entry in entries:
                seqs = [outcome.seq for outcome in entry.outcomes]
                if entry.batch is not None:
                    seqs += [ref.seq for ref in entry.batch.groups]
                    for ref in entry.batch.groups:
                        shares[ref.env] += ref.sequences
                assert settled.isdisjoint(seqs)
                settled.update(seqs)
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout(config.run)], follow=False) as stored:
            groups = [decode(RolloutGroup, message.data) async for message in stored]
    return shares, groups


def _serve(folder: Path, name: str, gateway: str) -> "subprocess.Popen[bytes]":
    script = Path(__file__).parents[2] / "examples" / "atropos_spelling.py"
    arguments = ["--slurm", "false", "--config", f"{name}.yaml", "--env.rollout_server_url", gateway]
    with (folder / f"{name}.log").open("ab") as sink:
        return subprocess.Popen(
            [str(PYTHON), str(script), "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
