"""`lachesis eval` of a run's last checkpoint: the tasks and, within noise, the rate of the run's last evaluation."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.harness import RUN, Run
from integration.servers import Supervised

from lachesis.pipeline.evaluator.logic.rates import TaskResult, compare_tasks
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode

STEPS = 4
ENVIRONMENT = """
from lachesis import Environment, Task


class Parity(Environment):
    def __len__(self):
        return 200

    def task(self, index):
        return Task(item=str(index), prompt=f"say {index}")

    def reward(self, task, session):
        return float(len(session.text) % 2)
"""
CONFIG = """
seed = 5

[environments.parity]
kind = "parity.py:Parity"
samples = 4
max_new_tokens = 8
concurrency = 4
longest_tokens = 64

[evaluate]
held_out = 0.2
every_steps = 2
items_between = 8
samples = 8

[batching]
batch_size = 16

[training]
steps = {steps}
checkpoint_every = 2

[health]
act = "warn"  # what an untrained model writes would stop any run
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "parity.py").write_text(ENVIRONMENT)
    it = Run(tmp_path, STEPS, Supervised(tmp_path))
    it.config.write_text(CONFIG.format(steps=STEPS))
    with it:
        yield it


def evaluate(run: Run, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    process = run.spawn("eval", *arguments, "--json", log=subprocess.PIPE)
    out, _ = process.communicate(timeout=300)
    return process.returncode, json.loads(out[out.index(b"{") :])["evaluations"]


async def test_the_last_checkpoint_has_the_tasks_and_the_rate_of_the_last_evaluation(run: Run) -> None:
    run.start()
    assert await run.wait(300) == 0, run.tail()
    events = []
    async with (
        run.servers.afterwards("test") as bus,
        bus.read(subjects.EVENTS, [subjects.event("eval", RUN, "live", "parity")], follow=False) as messages,
    ):
        events = [decode(EvalEvent, message.data) async for message in messages]
    last = events[-1]
    assert (last.policy_step, last.items, last.k) == (STEPS, 40, 8)
    assert 0 < last.avg < 1

    newest = latest_checkpoint(run.folder / CHECKPOINTS)
    code, (named, model) = evaluate(run, "newest", str(run.folder / "model"))
    assert code == 0
    assert (named["path"], named["tasks"], named["samples"]) == (str(newest), 40, 8)
    assert list(map(int, named["results"])) == last.tasks, "the same tasks in the same order"  # type: ignore[call-overload]
    columns = zip(last.tasks, last.task_successes, last.task_judged, strict=True)
    recorded = {task: TaskResult(*counts) for task, *counts in columns}
    now = {int(task): TaskResult(*pair) for task, pair in named["results"].items()}  # type: ignore[attr-defined]
    change = compare_tasks(recorded, now)
    assert change is not None
    assert change.tasks == 40
    assert abs(change.value) <= 4 * change.error
    assert named["pass_at"]["8"] == pytest.approx(last.pass_at_k, abs=0.3)  # type: ignore[index]
    assert list(model["results"]) == list(named["results"])  # type: ignore[call-overload]
    assert model["difference"] is not None

    few, (short,) = evaluate(run, "newest", "--items", "8", "--samples", "2")
    assert few == 0
    assert list(map(int, short["results"])) == last.tasks[:8]  # type: ignore[call-overload]
