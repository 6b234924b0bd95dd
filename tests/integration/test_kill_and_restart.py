"""Every process is killed in the middle of a run, the broker and the supervisor included, and the run goes on.

A real run: the real server, every service a process, a tiny untrained model. Afterwards the audit reads the
streams, and the ledger is trained on once more, in one go: the weights must be those of the run, bit for bit.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run, alive, trained_in_one_go, until
from integration.servers import Supervised

from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport
from lachesis.services.planned_processes import planned_processes

MANY = 1_000_000
"""Steps: more than it comes to, however long it takes to strike them all."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    it = Run(folder, MANY, Supervised(folder))
    with it:
        yield it


async def test_any_process_may_be_killed_and_nothing_is_lost_or_trained_twice(run: Run) -> None:
    run.start()
    await run.wait_for_step(2)
    victims = run.pids()
    del victims["supervisor"]
    assert len(set(victims.values())) == len(victims) == len(planned_processes(run.load_config())) + 1
    for name, pid in victims.items():
        before = run.step()
        os.kill(pid, signal.SIGKILL)
        await run.wait_for_step(before + 2)
        await run.wait_until_back(name, pid)
    everyone = run.pids()
    for name, kind in (("trainer", "torch"), ("environment-sums", "torch"), ("batcher", "plain")):
        above = [parent.cmdline() for parent in psutil.Process(everyone[name]).parents()]
        assert any("forkserver" in line and kind in line for line in above), f"the {name} was not forked as {kind}"
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    await until(lambda: not any(alive(pid) for name, pid in everyone.items() if name != "supervisor"), 90)
    steps = run.step() + 6
    run.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
    run.start()
    assert await run.wait(400) == 0, run.tail()
    assert run.step() == steps

    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
        calm = await trained_in_one_go(bus, run.folder / "model", steps)
    assert found.violations == []
    assert found.batches >= steps
    assert found.rollouts >= found.resolved > 0
    assert stored is not None
    report = decode(TrainReport, stored.data)
    assert (report.step, report.voids) == (steps, [])
    checkpoint = load_checkpoint(Path(report.checkpoint), LearnerConfig())
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm, "the kills show in the weights"
    print(f"audit: {found}")
