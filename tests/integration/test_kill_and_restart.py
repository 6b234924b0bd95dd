"""Every process is killed in the middle of a run, the broker and the supervisor included, and the run goes on.

A real run: the real server, every service a process, a tiny untrained model. Afterwards the audit reads the
streams, and the ledger is trained on once more, in one go: the weights must be those of the run, bit for bit.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from integration.audit import audit

from lachesis.pipeline.batching.chain import Position
from lachesis.pipeline.batching.read import fetch_batch, follow_ledger
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.training.batch import pack
from lachesis.pipeline.training.checkpoint import load_checkpoint
from lachesis.pipeline.training.config import LearnerConfig
from lachesis.pipeline.training.learner import Learner
from lachesis.pipeline.training.model import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.training.sequences import training_sequences
from lachesis.pipeline.weights.tensors import policy_tensors, weights_digest
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = f"""
[environments.sums]
kind = "{EXAMPLES / "sums.py"}:Sums"
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluation.sums]
kind = "{EXAMPLES / "sums.py"}:Sums"
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
steps = 60
checkpoint_every = 4

[flow]
lease_s = 3.0
"""


class Run:
    """`lachesis up` as a process, in a folder with a space in its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
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


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    it = Run(folder)
    try:
        yield it
    finally:
        if it.process is not None and it.process.poll() is None:
            it.process.terminate()
            it.process.wait(30)


def alive(pid: int) -> bool:
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


async def test_any_process_may_be_killed_and_nothing_is_lost_or_trained_twice(run: Run) -> None:
    run.start()
    run.wait_for_step(2)
    victims = run.pids()
    del victims["supervisor"]
    assert len(set(victims.values())) == len(victims) == 13
    for name, pid in victims.items():
        before = run.step()
        os.kill(pid, signal.SIGKILL)
        run.wait_for_step(min(before + 2, 56))
        await run.wait_until_back(name, pid)
    everyone = run.pids()
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    end = time.monotonic() + 30
    while any(alive(pid) for name, pid in everyone.items() if name != "supervisor"):
        assert time.monotonic() < end, "processes outlived their supervisor"
        await anyio.sleep(0.1)
    run.start()
    assert run.process.wait(180) == 0, run.tail()
    assert run.step() == 60

    async with (
        EmbeddedServer(run.folder / "nats") as server,
        await connect(server.url, name="audit", token=server.token) as bus,
    ):
        found = await audit(bus, "killed")
        stored = await bus.last(subjects.LEDGER, subjects.state("killed", "trainer", "live", "main"))
        calm = await trained_in_one_go(bus, run.folder / "model", 60)
    assert found.violations == []
    assert found.batches >= 60
    assert found.rollouts >= found.resolved > 0
    assert stored is not None
    report = decode(TrainReport, stored.data)
    assert (report.step, report.voids) == (60, [])
    checkpoint = load_checkpoint(Path(report.checkpoint), LearnerConfig())
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm, "the kills show in the weights"
    print(f"audit: {found}")
