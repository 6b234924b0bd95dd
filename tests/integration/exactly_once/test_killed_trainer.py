"""A trainer's process killed (-9) inside a step: the same batches come again, the weights are the same to the bit."""

import os
import shutil
import signal
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
import torch

from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport

RUN = "r"
PROGRAM = str(Path(__file__).parent / "stopping_trainer.py")
CONFIG = """
run = "r"
model = "{model}"

[training]
steps = {steps}
checkpoint_every = 3
learner = {{ learning_rate = 1e-2 }}
"""
BATCHES = 14
KILLED_IN = 4
"""The newest checkpoint is then of step 3: the ten manifests after it are those of batches 3 to 12."""
STEPS = 3 + 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def manifests(folder: Path) -> list[str]:
    return (folder / "manifests").read_text().splitlines()


async def finish(process) -> int:
    return await anyio.to_thread.run_sync(process.wait)


async def test_it_resumes_with_the_next_ten_manifests_and_the_same_weights(site, copy_of, make_lab, monkeypatch):
    policy = build_tiny_policy(0, width=32, layers=2, heads=2, max_length=48)
    save_policy(policy, site.folder / "model")
    config = CONFIG.format(model=site.folder / "model", steps=STEPS)
    draw = np.random.default_rng(0)
    async with site.server() as bus:
        lab = make_lab(bus)
        for number in range(BATCHES):
            lengths = draw.integers(5, 12, 3)
            groups = [
                lab.group(10 * number + n, samples=4, tokens=int(length), tokenizer_hash=policy.tokenizer_hash)
                for n, length in enumerate(lengths)
            ]
            await lab.extend_ledger(groups)
    calm = copy_of(site, "a calm run")

    monkeypatch.setenv("TRAINER_FOLDER", str(calm.folder))
    async with calm.server():
        process = calm.start(config, "trainer", program=(PROGRAM,))
        assert await finish(process) == 0, calm.said(process)
    expected = manifests(calm.folder)
    assert [int(line.split()[0]) for line in expected] == list(range(STEPS))
    assert len({line.split()[1] for line in expected}) == STEPS

    monkeypatch.setenv("TRAINER_FOLDER", str(site.folder))
    monkeypatch.setenv("STOP_IN", str(KILLED_IN))
    async with site.server() as bus:
        process = site.start(config, "trainer", program=(PROGRAM,))
        with anyio.fail_after(180):
            while not (site.folder / "inside").exists():
                assert process.poll() is None, site.said(process)
                await anyio.sleep(0.02)
        assert (site.folder / "inside").read_text() == "inside step, weights moved"
        os.kill(process.pid, signal.SIGKILL)
        assert await finish(process) == -signal.SIGKILL
        assert manifests(site.folder) == expected[: KILLED_IN + 1]
        checkpoint = load_checkpoint(latest_checkpoint(site.folder / "checkpoints"), LearnerConfig())
        assert checkpoint.state.step == 3

        (site.folder / "manifests").unlink()
        monkeypatch.delenv("STOP_IN")
        process = site.start(config, "trainer", program=(PROGRAM,))
        assert await finish(process) == 0, site.said(process)
        stored = await bus.last(subjects.LEDGER, subjects.state("r", "trainer", "live", "main"))
    assert manifests(site.folder) == expected[3:]
    assert len(manifests(site.folder)) == 10
    assert decode(TrainReport, stored.data).step == STEPS
    weights = [
        policy_tensors(load_checkpoint(latest_checkpoint(folder / "checkpoints"), LearnerConfig()).policy.model)
        for folder in (site.folder, calm.folder)
    ]
    start = policy_tensors(policy.model)
    assert weights[0].keys() == weights[1].keys() == start.keys()
    assert all(torch.equal(weights[0][name].view(torch.int32), weights[1][name].view(torch.int32)) for name in start)
    assert any(not torch.equal(a, b) for a, b in zip(weights[0].values(), start.values(), strict=True))
    rows = [msgspec.json.decode(row) for row in (site.folder / "metrics.jsonl").read_bytes().splitlines()]
    assert [row["train/step"] for row in rows] == list(range(1, STEPS + 1))
    shutil.rmtree(calm.folder)
