"""A run to be killed: `lachesis up` as a process, the real server, every service a process, a tiny untrained model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import torch

from lachesis.pipeline.batching.chain import Position
from lachesis.pipeline.batching.read import fetch_batch, follow_ledger
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.training.batch import pack
from lachesis.pipeline.training.config import LearnerConfig
from lachesis.pipeline.training.learner import Learner
from lachesis.pipeline.training.model import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.training.sequences import training_sequences
from lachesis.pipeline.weights.tensors import policy_tensors, weights_digest

SUMS = Path(__file__).parents[1] / "examples" / "sums.py"
CONFIG = """
[environments.sums]
kind = "{sums}:Sums"
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluation.sums]
kind = "{sums}:Sums"
max_new_tokens = 8

[evaluate]
every_steps = 1000
items = 4

[[scoring.raters]]
rater = "letters:letters"

[[scoring.raters]]
rater = "repetition"

[batching]
batch_size = 16
teacher = "optional"

[teacher]
enabled = true

[training]
steps = {steps}
checkpoint_every = 4

[flow]
lease_s = 3.0
"""


class Run:
    """`lachesis up` as a process, in a folder with a space in its name."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
        save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), folder / "model")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        sets = [f"--set=folder={self.folder}", f"--set=model={self.folder / 'model'}", "--set=run=killed"]
        with (self.folder / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lachesis", "up", "--config", str(self.config), *sets],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            )

    def pids(self) -> dict[str, int]:
        try:
            found: dict[str, int] = json.loads((self.folder / "pids.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def step(self) -> int:
        """Steps trained so far, by the trainer's own log."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_bytes().splitlines() if file.exists() else []
        return int(json.loads(lines[-1])["train/step"]) if lines else 0

    def wait_for_step(self, step: int, deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while self.step() < step:
            assert self.process is not None
            assert self.process.poll() is None, f"the run ended at step {self.step()}:\n{self.tail()}"
            assert time.monotonic() < end, f"still at step {self.step()} of {step} after {deadline_s} s:\n{self.tail()}"
            time.sleep(0.05)

    async def wait_until_back(self, name: str, pid: int) -> None:
        with anyio.fail_after(60):
            while self.pids().get(name, pid) == pid:  # noqa: ASYNC110 - another process writes the file
                await anyio.sleep(0.05)

    def tail(self) -> str:
        return (self.folder / "up.log").read_text()[-3000:]


def alive(pid: int) -> bool:
    """Return whether the process runs; one that ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]


async def trained_in_one_go(bus: Bus, model: Path, steps: int) -> str:
    """Return the digest of the weights after training on the ledger's first batches, in one process, uninterrupted."""
    torch.set_num_threads(1)
    policy = load_model(model)
    learner = Learner(policy.model, LearnerConfig())
    async for entry in follow_ledger(bus, "killed", "main", Position(), follow=False):
        if entry.batch is None or entry.batch.number >= steps:
            continue
        sequences = []
        for ref, group, teacher in await fetch_batch(bus, entry.batch):
            sequences += training_sequences(ref, group, teacher, tokenizer_hash=policy.tokenizer_hash)
        learner.step(pack(sequences, pad_id=policy.tokenizer.pad_token_id))
    assert learner.steps == steps
    return weights_digest(policy_tensors(policy.model))
