"""A trainer with a back end of a foreign package, killed (-9) inside a step: the same stage and promises."""

import json
import os
import shutil
import signal
from pathlib import Path

import anyio
import numpy as np
import pytest

from lachesis.pipeline.extension import GROUP
from lachesis.pipeline.ledger.checkpoint_state import known_checkpoints, latest_checkpoint
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ledger import TrainReport

RUN = "r"
CONFIG = 'run = "r"\n[training]\nbackend = "abacus"\nsteps = 8\ncheckpoint_every = 3\n'
STEPS = 8
KILLED_IN = 4
"""The newest checkpoint is then of step 3."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    """Install the module `abacus`, as pip would, for the processes to come."""
    packages = tmp_path / "packages"
    described = packages / "abacus-1.0.dist-info"
    described.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "abacus.py", packages)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[{GROUP}]\nabacus = abacus:EXTENSION\n")
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)


def taken(site):
    return (site.folder / "taken").read_text().splitlines()


@pytest.mark.usefixtures("_installed")
async def test_it_counts_each_batch_once_over_a_kill(site, copy_of, make_lab, monkeypatch):
    draw = np.random.default_rng(0)
    async with site.server() as bus:
        lab = make_lab(bus)
        for number in range(STEPS + 1):
            lengths = draw.integers(5, 12, 3)
            await lab.extend_ledger(
                [lab.group(10 * number + n, samples=2, tokens=int(length)) for n, length in enumerate(lengths)]
            )
    calm = copy_of(site, "a calm run")
    async with calm.server():
        process = calm.start(CONFIG, "trainer")
        assert await anyio.to_thread.run_sync(process.wait) == 0, calm.said(process)
    expected = taken(calm)
    assert [int(line.split()[0]) for line in expected] == list(range(STEPS))

    async with site.server() as bus:
        monkeypatch.setenv("STOP_IN", str(KILLED_IN))
        process = site.start(CONFIG, "trainer")
        with anyio.fail_after(180):
            while not (site.folder / "inside").exists() or not latest_checkpoint(site.folder / "checkpoints"):
                assert process.poll() is None, site.said(process)
                await anyio.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        await anyio.to_thread.run_sync(process.wait)
        assert taken(site) == expected[: KILLED_IN + 1]
        monkeypatch.delenv("STOP_IN")
        process = site.start(CONFIG, "trainer")
        assert await anyio.to_thread.run_sync(process.wait) == 0, site.said(process)
        subject = subjects.state("r", "trainer", subjects.LIVE, "main")
        async with bus.read(subjects.LEDGER, [subject], follow=False) as messages:
            reports = [decode(TrainReport, message.data) async for message in messages]
        policy = decode(PolicyRecord, (await bus.value(keys.POLICY)).value)
    assert taken(site)[KILLED_IN + 1 :] == expected[3:], "from the checkpoint on, the same batches to the same weights"
    assert [report.step for report in reports] == [3, 6, 8]
    path, state = known_checkpoints(site.folder / "checkpoints")[0]
    weights = int(expected[-1].split()[1])
    assert (state.step, json.loads((path / "abacus.json").read_text())) == (STEPS, weights)
    assert policy.version == state.policy_version == reports[-1].policy_version
    assert policy.weights == f"abacus://{weights}"
    rows = [json.loads(row) for row in (site.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/step"] for row in rows] == list(range(1, STEPS + 1))
