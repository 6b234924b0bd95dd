"""A run is upgraded under load, one service after the other, and nothing is lost.

Each process gets SIGTERM, drains and starts again as a newer build, which writes fields that the others do not
know yet; so at any moment old and new ones read each other. Then nats-server is restarted, and at last the whole run.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run, trained_in_one_go
from integration.servers import Supervised

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport
from lachesis.services.process.service_process import EXIT_DRAINED

MANY = 1_000_000
"""Steps: more than it comes to, however long the upgrades take."""
NEWER = Path(__file__).parent / "newer"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "newer").write_text("")
    environ = {"PYTHONPATH": str(NEWER), "NEWER_BUILD": str(folder / "newer")}
    it = Run(folder, MANY, Supervised(folder), sets={"services.drain_s": 60}, environ=environ)
    with it:
        yield it


async def written(bus: Bus, stream: str, subject: str) -> Counter[str]:
    """Count messages by the build that wrote them."""
    found: Counter[str] = Counter()
    async with bus.read(stream, [subject], follow=False) as messages:
        async for message in messages:
            found["newer" if "from_a_newer_build" in msgspec.msgpack.decode(message.data) else "older"] += 1
    return found


async def test_services_are_upgraded_one_by_one_under_load_and_nothing_is_lost(run: Run) -> None:
    run.start()
    await run.wait_for_step(2)
    processes = run.pids()
    del processes["supervisor"]
    upgraded: list[str] = []
    order = sorted(processes, key=lambda name: name == "nats-server")
    for name in order:
        before, pid = run.step(), processes[name]
        upgraded.append(name.split("-")[0])
        (run.folder / "newer").write_text(" ".join(upgraded))
        os.kill(pid, signal.SIGTERM)
        await run.wait_until_back(name, pid)
        await run.wait_for_step(before + 2)
    assert run.process is not None
    warned = [line for line in (run.folder / "up.log").read_text().splitlines() if " WARNING " in line]
    ends = [line for line in warned if " ended with code " in line]
    drained = [line for line in ends if f"ended with code {EXIT_DRAINED}: drained;" in line]
    assert len(drained) == len(ends) - 1 == len(processes) - 1, ends  # all but nats-server: none was late, none failed
    run.process.terminate()
    assert await run.wait(200) == 0, run.tail()
    steps = run.step() + 6
    run.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
    run.start()
    assert await run.wait(400) == 0, run.tail()
    assert run.step() == steps

    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
        calm = await trained_in_one_go(bus, run.folder / "model", steps)
        builds = {
            "rollout": await written(bus, subjects.ROLLOUTS, subjects.rollout(RUN)),
            "score": await written(bus, subjects.EVENTS, subjects.event("score", RUN, "live")),
            "reward": await written(bus, subjects.EVENTS, subjects.event("reward", RUN, "live")),
            "teacher": await written(bus, subjects.EVENTS, subjects.event("teacher", RUN, "live")),
            "ledger": await written(bus, subjects.LEDGER, subjects.ledger(RUN, "main")),
            "dead": await written(bus, subjects.EVENTS, subjects.event("dead", RUN, "live")),
        }
    print(f"audit: {found}; {builds}")
    assert found.violations == []
    assert found.batches >= steps
    assert found.outcomes.get("dead", 0) == 0
    assert builds.pop("dead") == {}
    for kind, count in builds.items():
        assert min(count["older"], count["newer"]) > 0, f"{kind}: {count}"
    assert stored is not None
    report = decode(TrainReport, stored.data)
    assert (report.step, report.voids) == (steps, [])
    checkpoint = load_checkpoint(Path(report.checkpoint), LearnerConfig())
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm, "the upgrade shows in the weights"
