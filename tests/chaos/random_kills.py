"""Random kills of a run's processes, then the audit.

    python tests/chaos/random_kills.py --seed 1 --kills 60

At random moments (`--pause` seconds apart on average) one process, drawn at random, is killed with SIGKILL, or stopped
for up to two seconds and continued: any service, nats-server, now and then the supervisor, which is then started again.
When all kills are done the run may finish. Prints one line of JSON and exits with 1 if the audit finds a violation, the
run does not finish, or the weights differ from those of one uninterrupted training on the ledger.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.audit import audit
from integration.harness import RUN, Run, alive, trained_in_one_go
from integration.servers import Supervised

from lachesis.pipeline.training.checkpoint import latest_checkpoint, load_checkpoint
from lachesis.pipeline.training.config import LearnerConfig
from lachesis.pipeline.weights.tensors import policy_tensors, weights_digest


def strike(run: Run, rng: random.Random, struck: Counter[str]) -> None:
    """Kill or freeze one process."""
    assert run.process is not None
    targets = {name: pid for name, pid in run.pids().items() if pid and name != "supervisor"}
    if rng.random() < 0.05 or not targets:
        run.process.kill()
        run.process.wait()
        struck["supervisor killed"] += 1
        wait_for_lock(run)
        run.start()
        return
    name = rng.choice(sorted(targets))
    frozen = rng.random() < 0.25
    try:
        os.kill(targets[name], signal.SIGSTOP if frozen else signal.SIGKILL)
        if frozen:
            time.sleep(rng.uniform(0.1, 2.0))
            os.kill(targets[name], signal.SIGCONT)
    except ProcessLookupError:
        return  # it had just been struck
    struck[f"{name.rstrip('-0123456789')} {'frozen' if frozen else 'killed'}"] += 1


def wait_for_lock(run: Run) -> None:
    """Wait until the killed supervisor's server has let go of the store: it drains by itself."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(alive(pid) for name, pid in run.pids().items() if pid and name != "supervisor"):
            return
        time.sleep(0.1)


async def judge(run: Run, weights: str) -> dict[str, object]:
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        calm = await trained_in_one_go(bus, run.folder / "model", run.steps)
    return {
        "rollouts": found.rollouts,
        "resolved": found.resolved,
        "batches": found.batches,
        "outcomes": found.outcomes,
        "violations": found.violations,
        "weights_equal": weights == calm,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between two")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of the run, at most")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    folder = Path(tempfile.mkdtemp(prefix="lachesis chaos "))
    run = Run(folder, arguments.steps, Supervised(folder))
    struck: Counter[str] = Counter()
    run.start()
    anyio.run(run.wait_for_step, 2)
    while sum(struck.values()) < arguments.kills:
        time.sleep(rng.expovariate(1 / arguments.pause))
        assert run.process is not None
        if run.process.poll() is not None:
            print(f"the run ended with {run.process.returncode} in the middle:\n{run.tail()}", file=sys.stderr)
            return 1
        strike(run, rng, struck)
    reached = run.step()
    anyio.run(run.wait_for_step, reached + 5)  # it still goes on
    assert run.process is not None
    run.process.terminate()
    code = run.process.wait(60)
    path = latest_checkpoint(folder / "checkpoints")
    assert path is not None
    checkpoint = load_checkpoint(path, LearnerConfig())
    run.steps = checkpoint.state.step
    result = anyio.run(judge, run, weights_digest(policy_tensors(checkpoint.policy.model)))
    print(json.dumps({"seed": arguments.seed, "exit": code, "steps": run.steps, "struck": struck, **result}))
    return 0 if code == 0 and not result["violations"] and result["weights_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
