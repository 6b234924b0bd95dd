"""A run of tiny size on the device: its trainer is killed, goes on, and the run is reproduced, bit for bit."""

import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

import anyio
import anyio.to_thread
from gpu.figures import check
from gpu.models import DEVICE
from integration.harness import RUN, Run, trained_in_one_go
from integration.servers import Supervised

from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport

__all__ = ["measure"]


def measure(*, small: bool) -> None:
    """Run all of it."""
    anyio.run(_measure, 8 if small else 20)


async def _measure(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lachesis resume ") as place:
        folder = Path(place)
        sets = {"training.device": DEVICE, "teacher.enabled": "false", "batching.teacher": "off"}
        with Run(folder, steps, Supervised(folder), sets=sets) as run:
            run.start()
            await run.wait_for_step(steps // 2 - 1)
            killed = run.pids()["trainer"]
            os.kill(killed, signal.SIGKILL)
            await run.wait_until_back("trainer", killed)
            ended = await run.wait(120)
            check(f"a trainer killed on {DEVICE} goes on to the last step", ended == 0 and run.step() == steps)
            if ended != 0:
                raise SystemExit(run.tail())
            async with run.servers.afterwards("gpu") as bus:
                stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
                assert stored is not None
                report = decode(TrainReport, stored.data)
                found = load_checkpoint(Path(report.checkpoint), LearnerConfig())
                calm = await trained_in_one_go(bus, run.folder / "model", steps)
            digest = weights_digest(policy_tensors(found.policy.model))
            check(f"its weights on {DEVICE} are those of no kill, bit for bit", digest == calm, f"{digest[:12]}")
            await anyio.to_thread.run_sync(_reproduce, run)


def _reproduce(run: Run) -> None:
    process = run.spawn("reproduce", "--json", log=subprocess.PIPE)
    out, errors = process.communicate(timeout=120)
    try:
        findings = json.loads(out[out.index(b"{") :])["findings"]
    except ValueError:
        check("reproduce", ok=False, text=(out + (errors or b"")).decode(errors="replace")[-300:])
        return
    for finding in findings:
        check(f"reproduce: {finding['check']}", finding["verdict"] == "ok", finding["text"][:160])
