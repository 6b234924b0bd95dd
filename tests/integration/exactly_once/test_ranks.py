"""Two ranks of a trainer, killed -9 one and the other: both end, and no batch is trained twice or lost.

The trainer goes on with weights spread over its ranks, and then as one process. One more process trains on the whole
ledger, whose chain it verifies, without a break: the weights are the same within rounding.
"""

import os
import signal

import anyio
import anyio.to_thread
import numpy as np
import psutil
import pytest
import torch
from integration.harness import alive, steps_trained, until, weights_in_one_go

from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport
from lachesis.services.process.service_process import EXIT_RANK_LOST

RUN = "r"
CONFIG = """
run = "r"
model = "{model}"

[training]
device = "cpu"  # two ranks would take two GPUs
checkpoint_every = 3
"""
TWO = "ranks = 2\n"
TWO_SHARDED = 'ranks = 2\nsharding = "full"\n'
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lachesis")
STEPS = 16
ENDED_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def extend(site, make_lab):
    """Add as many batches of three groups to the ledger."""
    policy = build_tiny_policy(0, width=32, layers=2, heads=2, max_length=48)
    save_policy(policy, site.folder / "model")
    draw = np.random.default_rng(0)
    numbers = iter(range(1000))

    async def extend(bus, batches):
        lab = make_lab(bus)
        for _ in range(batches):
            lengths = draw.integers(5, 12, 3)
            await lab.extend_ledger(
                [
                    lab.group(next(numbers), samples=4, tokens=int(length), tokenizer_hash=policy.tokenizer_hash)
                    for length in lengths
                ]
            )

    return extend


async def trained(site, process, step):
    def reached():
        assert process.poll() is None, site.said(process)
        return steps_trained(site.folder) >= step

    await until(reached, 300)


def other_rank(process):
    (child,) = psutil.Process(process.pid).children()
    return child.pid


async def test_a_killed_rank_ends_the_other_and_the_trainer_goes_on_as_if_it_had_not(site, extend, monkeypatch):
    monkeypatch.setattr("integration.harness.RUN", RUN)
    config = CONFIG.format(model=site.folder / "model")
    async with site.server() as bus:
        await extend(bus, 8)
        process = site.start(config + TWO, "trainer")
        await trained(site, process, 4)
        os.kill(other_rank(process), signal.SIGKILL)
        with anyio.fail_after(ENDED_S):
            assert await anyio.to_thread.run_sync(process.wait) == EXIT_RANK_LOST, site.said(process)
        assert "rank 1 of the trainer was killed" in site.said(process)
        assert "Traceback" not in site.said(process)

        process = site.start(config + TWO_SHARDED, "trainer")
        await trained(site, process, 8)
        await extend(bus, STEPS - 8 - 3)
        await trained(site, process, STEPS - 3)
        follower = other_rank(process)
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: not alive(follower), ENDED_S)

        await extend(bus, 3)
        process = site.start(f"{config}steps = {STEPS}\n", "trainer")
        assert await anyio.to_thread.run_sync(process.wait) == 0, site.said(process)
        calm = await weights_in_one_go(bus, site.folder / "model", STEPS, "cpu")
        async with bus.read(subjects.LEDGER, [subjects.state(RUN, "trainer", "live", "main")], follow=False) as stored:
            reports = [decode(TrainReport, message.data) async for message in stored]
    assert [report.voids for report in reports] == [[]] * len(reports)
    assert [report.step for report in reports] == sorted({report.step for report in reports})
    assert [reports[0].numerics.ranks, reports[-1].numerics.ranks, reports[-1].step] == [2, 1, STEPS]
    found = policy_tensors(
        load_checkpoint(latest_checkpoint(site.folder / "checkpoints"), LearnerConfig()).policy.model
    )
    began = policy_tensors(load_model(site.folder / "model").model)
    assert distance(found, calm) < 0.01 * distance(began, calm), "a batch more or less is a sixteenth of the way"


async def test_torchrun_starts_the_ranks_as_well(site, extend, monkeypatch):
    monkeypatch.setattr("integration.harness.RUN", RUN)
    config = CONFIG.format(model=site.folder / "model")
    async with site.server() as bus:
        await extend(bus, 4)
        process = site.start(f"{config}steps = 4\n", "trainer", program=TORCHRUN)
        assert await anyio.to_thread.run_sync(process.wait) == 0, site.said(process)
        assert "rank 1 of 2 joined at step 0" in site.said(process)
        calm = await weights_in_one_go(bus, site.folder / "model", 4, "cpu")
    found = policy_tensors(
        load_checkpoint(latest_checkpoint(site.folder / "checkpoints"), LearnerConfig()).policy.model
    )
    began = policy_tensors(load_model(site.folder / "model").model)
    assert distance(found, calm) < 0.01 * distance(began, calm)


def distance(one, other):
    return float(torch.stack([(one[name] - other[name]).norm() for name in other]).norm())
