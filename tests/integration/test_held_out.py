"""`lachesis up` without an [evaluation] table: held-out tasks are evaluated and never trained on, kill -9 or not."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.harness import RUN, SUMS, Run, until
from integration.servers import Supervised

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.config.evaluation_sources import held_out_tasks
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, best_checkpoint, latest_checkpoint
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

STEPS = 6
CONFIG = f"""
[environments.sums]
kind = "{SUMS}:Sums"
params = {{ largest = 9 }}
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluate]
every_steps = 2
items_between = 8
samples = 2

[[scoring.raters]]
rater = "letters:letters"

[batching]
batch_size = 16

[training]
steps = {STEPS}
checkpoint_every = 2

[health]
act = "warn"  # what an untrained model writes would stop any run
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    it = Run(folder, STEPS, Supervised(folder))
    it.config.write_text(CONFIG)
    with it:
        yield it


async def read(bus: Bus, stream: str, subject: str) -> list[bytes]:
    async with bus.read(stream, [subject], follow=False) as messages:
        return [message.data async for message in messages]


async def test_held_out_tasks_are_evaluated_once_a_policy_and_never_trained_on(run: Run) -> None:
    run.start()
    await until(lambda: "held-out sums:" in run.tail(), 120)
    os.kill(run.pids()["evaluator"], signal.SIGKILL)
    assert await run.wait(300) == 0, run.tail()

    config = run.load_config()
    held_out = held_out_tasks(
        config, "sums", load_environment(f"{SUMS}:Sums", {"largest": 9}).item_keys()
    ).tasks.tolist()
    async with run.servers.afterwards("test") as bus:
        stored = await read(bus, subjects.EVENTS, subjects.event("eval", RUN, "live", "sums"))
        groups = await read(bus, subjects.ROLLOUTS, subjects.rollout(RUN, "sums"))
    events = [decode(EvalEvent, data) for data in stored]
    drawn = {group.dispatch.index for data in groups if (group := decode(RolloutGroup, data)).dispatch}
    assert drawn
    assert not drawn & set(held_out)
    assert len(held_out) == 10
    steps = [event.policy_step for event in events]
    assert steps == sorted(set(steps)), "no policy is evaluated twice"
    assert (steps[0], steps[-1]) == (0, STEPS)
    assert all(event.tasks == held_out[: len(event.tasks)] for event in events)

    said = (run.folder / "up.log").read_text().splitlines()
    lines = [line for line in said if line.startswith("held-out sums: ")]
    assert len(lines) == len(events)
    assert re.match(
        rf"held-out sums: \d\.\d\d \[\d\.\d\d, \d\.\d\d\] after step {STEPS} "
        r"\(first \d\.\d\d: [+-]\d\.\d\d \+- \d\.\d\d\)",
        lines[-1],
    )
    assert any(line.startswith("held out of training and evaluated every 2 steps: 10% of the tasks") for line in said)
    # an untrained model adds nothing up: all policies are alike, and of those the newest is the best
    best = best_checkpoint(run.folder / CHECKPOINTS)
    assert best == latest_checkpoint(run.folder / CHECKPOINTS)
    assert said[-1] == f"the best by held-out rate: {best} (sums 0.00 on 10 tasks)"

    status = run.spawn("status", "--json", log=subprocess.PIPE)
    out, _ = status.communicate(timeout=120)
    (shown,) = json.loads(out[out.index(b"{") :])["evaluations"]
    assert (shown["env"], shown["step"], shown["first_step"]) == ("sums", STEPS, 0)
