"""A run whose policy and teacher are served by real vLLM: weights flow back, vLLM is killed, the audit holds.

Once the weights of a step do not reach the model, though vLLM says so: nothing is sampled until they do.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from contract.inference_servers import ARGUMENTS, CPU, PYTHON
from integration.audit import audit
from integration.harness import RUN, Run, alive, trained_in_one_go, until
from integration.servers import Supervised

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.rollout import RolloutGroup

STEPS = 30
WRONG = "computes with other weights than those of policy"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed; `make vllm` installs it and runs this"),
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    sets = {"services.ready_s": 1800, "environments.sums.timeout_s": 60}
    for role in ("policy", "teacher"):
        sets |= {
            f"inference.{role}.kind": "vllm",
            f"inference.{role}.python": PYTHON,
            f"inference.{role}.args": json.dumps(ARGUMENTS),
        }
    losing = ["--worker-extension-cls", "losing_worker.LosingExtension"]
    sets["inference.policy.args"] = json.dumps([*ARGUMENTS, *losing])
    environ = {**CPU, "LOSING": str(tmp_path / "losing")}
    it = Run(tmp_path, STEPS, Supervised(tmp_path), sets=sets, environ=environ)
    # heads of 32: vLLM's attention on a CPU has none smaller
    save_policy(build_tiny_policy(0, width=64, layers=1, heads=2, max_length=64), tmp_path / "model")
    with it:
        yield it


async def status(run: Run) -> str:
    """What `lachesis status` prints."""
    command = [sys.executable, "-m", "lachesis", "status", *run.arguments]
    return (await anyio.run_process(command, env=run.environ, check=False)).stdout.decode()


def vllm_of(pid: int) -> list[int]:
    """The processes that the service `pid` has started, theirs included."""
    found, parents = [], [pid]
    while parents:
        children = Path(f"/proc/{parents[0]}/task/{parents[0]}/children")
        mine = [int(child) for child in children.read_text().split()] if children.exists() else []
        found += mine
        parents = parents[1:] + mine
    return found


async def test_weights_flow_to_vllm_and_a_killed_one_comes_back_on_the_newest(run: Run) -> None:
    run.start()
    await run.wait_for_step(3, 1800)
    service = run.pids()["inference-policy"]
    server, *workers = vllm_of(service)
    assert workers, "vLLM has processes of its own"
    before = run.step()
    os.kill(server, signal.SIGKILL)  # environments generate all the time: this is in the middle of it
    await run.wait_until_back("inference-policy", service)
    await until(lambda: not any(alive(pid) for pid in workers), 300)
    await run.wait_for_step(before + 4, 1800)

    service = run.pids()["inference-policy"]
    processes = vllm_of(service)
    before = run.step()
    os.kill(service, signal.SIGKILL)  # the service itself: its vLLM must not stay behind
    await until(lambda: not any(alive(pid) for pid in processes), 300)
    await run.wait_for_step(before + 3, 1800)

    losing = run.folder / "losing"
    losing.touch()
    with anyio.fail_after(1800):
        while WRONG not in (said := await status(run)):
            assert run.process.poll() is None, run.tail()
    losing.unlink()
    print(next(line for line in said.splitlines() if WRONG in line))
    await run.wait_for_step(run.step() + 1, 1800)
    everyone = [pid for name in ("inference-policy", "inference-teacher") for pid in vllm_of(run.pids()[name])]
    assert await run.wait(1800) == 0, run.tail()
    assert not any(alive(pid) for pid in everyone)

    steps, taught = set(), 0
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        stored = await bus.last(subjects.LEDGER, subjects.state(RUN, "trainer", "live", "main"))
        calm = await trained_in_one_go(bus, run.folder / "model", STEPS)
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as rollouts:
            async for message in rollouts:
                group = decode(RolloutGroup, message.data)
                steps |= {version.step for version in group.versions}
        async with bus.read(subjects.TEACHER, [subjects.logprobs(RUN, "live")], follow=False) as arrays:
            async for _ in arrays:
                taught += 1
    assert found.violations == []
    assert found.batches >= STEPS
    assert stored is not None
    report = decode(TrainReport, stored.data)
    assert (report.step, report.voids) == (STEPS, [])
    checkpoint = load_checkpoint(Path(report.checkpoint), LearnerConfig())
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm, "the kills show in the weights"
    assert len(steps) >= STEPS // 2, f"rollouts came from the policies of steps {sorted(steps)} alone"
    assert taught
    print(f"audit: {found}; rollouts of the policies of steps {sorted(steps)}")
