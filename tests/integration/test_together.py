"""Services that share a process work, are shown and are killed as those with processes of their own.

Real runs: the real server, a tiny untrained model. Afterwards the audit reads the streams.
"""

import json
import os
import signal
from pathlib import Path

import anyio
import pytest
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run, trained_in_one_go
from integration.security.secured import Secured, auth_init, make_certificates
from integration.servers import Supervised

from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport

SERVICES = ("governor", "batcher", "normalizer", "curriculum", "health", "teacher")
SHARED = "+".join(SERVICES)
SETS = {"services.together": json.dumps([SERVICES])}
KILLS = 3
MANY = 1_000_000
"""Steps: more than it comes to, however long the kills take."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_shared_process_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, MANY, Supervised(tmp_path), sets=SETS)
    with run:
        run.start()
        await run.wait_for_step(2)
        await check_shown(run, run.pids()[SHARED])
        for _ in range(KILLS):
            before, pid = run.step(), run.pids()[SHARED]
            os.kill(pid, signal.SIGKILL)
            await run.wait_for_step(before + 2)
            await run.wait_until_back(SHARED, pid)
    steps = run.step() + 6
    run.config.write_text(CONFIG.format(sums=SUMS, steps=steps))
    with run:
        run.start()
        assert await run.wait(400) == 0, run.tail()
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
        calm = await trained_in_one_go(bus, run.folder / "model", steps)
    assert found.violations == []
    assert found.rollouts >= found.resolved > 0
    assert stored is not None
    checkpoint = load_checkpoint(Path(decode(TrainReport, stored.data).checkpoint), LearnerConfig())
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm, "the kills show in the weights"
    lines = (run.folder / "logs" / f"{SHARED}.log").read_text().splitlines()
    for service in SERVICES:  # each began and drained in each life, under its own name
        assert sum(f" {service} started, pid" in line for line in lines) == KILLS + 2
        assert sum(line.endswith(f" {service} drained") for line in lines) == 2


async def check_shown(run: Run, pid: int) -> None:
    """Check that each service is shown by its own name, in the one process."""
    code, said = await anyio.to_thread.run_sync(run.called, "status", "--json")
    assert code == 0, said
    shown = {row["service"]: row for row in json.loads(said)["services"]}
    assert {name: shown[name]["pids"] for name in SERVICES} == {name: [pid] for name in SERVICES}
    assert all(shown[name]["state"] != "silent" for name in SERVICES)


async def test_with_keys_each_service_of_a_shared_process_has_its_own(tmp_path: Path) -> None:
    for name in ("server", "run"):
        (tmp_path / name).mkdir()
    make_certificates(tmp_path / "server")
    tls = ("--cert", str(tmp_path / "server" / "server.pem"), "--key", str(tmp_path / "server" / "server.key"))
    auth_init(tmp_path / "server", *tls, "--run", RUN, config=CONFIG.format(sums=SUMS, steps=4))
    async with Secured(tmp_path / "server", RUN) as server:
        run = Run(tmp_path / "run", 4, server, sets=SETS)
        with run:
            run.start()
            await run.wait_for_step(1)
            assert SHARED in run.pids()
            assert await run.wait(300) == 0, run.tail()
        async with server.during("audit") as bus:
            assert (await audit(bus, RUN)).violations == []
        assert "violation" not in server.log_path.read_text().lower()
