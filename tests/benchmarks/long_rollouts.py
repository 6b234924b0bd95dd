"""Are long rollouts trained on as often as they are begun? A tenth of the tasks take twenty times as many turns.

    python tests/benchmarks/long_rollouts.py --steps 120 --set batching.staleness_of=oldest

Runs `lachesis up` with all its services on a tiny random model. Each turn is answered by the run's inference server and
then waits `--turn-s`, as for a tool, so the time of a rollout grows with its length. Of the groups that were begun so
early that each had the time to end, it prints how many were trained, became stale, or ended otherwise, by kind of task.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import anyio
import torch

from lachesis import Environment, Session, Task
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

LONG_EVERY, LONG_TURNS = 10, 20
CONFIG = """
run = "long"
model = "model"
[environments.talks]
kind = "{file}:Talks"
samples = 4
max_new_tokens = 200
concurrency = 64
longest_tokens = 8000
record = "never"
params = {{ turn_s = {turn_s} }}
[batching]
batch_size = 16
[training]
steps = {steps}
checkpoint_every = 20
[training.learner]
learning_rate = 1e-5
[evaluate]
held_out = 0
[curriculum]
strategy = "uniform"
[health]
act = "warn"
"""


class Talks(Environment):
    """One turn, or twenty for each tenth task; the reward tells samples apart and says nothing."""

    max_turns = LONG_TURNS

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s

    def __len__(self) -> int:
        return 1000

    def task(self, index: int) -> Task:
        kind = "long" if index % LONG_EVERY == 0 else "short"
        return Task(item=f"{kind} {index}", prompt=f"Say {index}")

    async def rollout(self, task: Task, session: Session) -> None:
        for turn in range(LONG_TURNS if task.item.startswith("long") else 1):
            if turn:
                session.add("And?")
            await session.generate()
            await anyio.sleep(self._turn_s)

    def reward(self, task: Task, session: Session) -> float:
        return float(session.sample % 2)


async def measure(folder: Path, turn_s: float) -> None:
    """Print what became of the groups of each kind."""
    groups: dict[int, RolloutGroup] = {}
    ends: dict[int, str] = {}
    async with (
        EmbeddedServer(folder / "nats") as server,
        await connect(server.url, run="long", name="measure", token=server.token) as bus,
    ):
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout("long")], follow=False) as messages:
            async for message in messages:
                groups[message.seq] = decode(RolloutGroup, message.data)
        last_ns = 0
        async for entry in follow_ledger(bus, "long", "main", LedgerPosition(), follow=False):
            ends |= {outcome.seq: outcome.kind for outcome in entry.outcomes}
            if entry.batch is not None:
                ends |= dict.fromkeys((ref.seq for ref in entry.batch.groups), "trained")
                last_ns = entry.written_ns
    before_ns = last_ns - round(2 * LONG_TURNS * turn_s * 1e9)
    counts: dict[str, Counter[str]] = {"long": Counter(), "short": Counter()}
    tokens: dict[str, int] = {"long": 0, "short": 0}
    turns: Counter[str] = Counter()
    for seq, group in groups.items():
        if group.started_ns < before_ns:
            kind, end = group.item.split()[0], ends.get(seq, "open")
            counts[kind][end] += 1
            turns[kind] += sum(message.role == "assistant" for talk in group.messages for message in talk)
            tokens[kind] += sum(int(one.loss_mask.sum()) for one in group.sequences) if end == "trained" else 0
    begun, trained = (
        [counts[kind].total() for kind in counts],
        [counts[kind]["trained"] for kind in counts],
    )
    for kind, found in counts.items():
        mean = turns[kind] / max(1, 4 * found.total())
        print(f"{kind}: {found.total()} groups begun, {mean:.1f} turns; {dict(found)}; {tokens[kind]} tokens trained")
    shares = [of[0] / max(1, sum(of)) for of in (begun, trained)]
    print(f"share of the long ones: {shares[0]:.3f} of what was begun, {shares[1]:.3f} of what was trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--turn-s", type=float, default=0.5, help="seconds that a turn takes beside its answer")
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, NAME=VALUE")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=8192)
        with torch.no_grad():  # an untrained model would seldom end a turn
            policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 40
        save_policy(policy, folder / "model")
        (folder / "run.toml").write_text(
            CONFIG.format(file=Path(__file__).absolute(), steps=wanted.steps, turn_s=wanted.turn_s)
        )
        command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml", *(f"--set={s}" for s in wanted.set)]
        up = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if up.returncode:
            sys.exit(up.stdout[-3000:] + up.stderr[-3000:])
        print(f"steps {wanted.steps}, {' '.join(wanted.set) or 'defaults'}")
        anyio.run(measure, folder / "runs" / "long", wanted.turn_s)


if __name__ == "__main__":
    main()
