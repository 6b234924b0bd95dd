"""What a kill costs agents of 40 turns, in seconds of generation, with recorded calls and without.

    python tests/benchmarks/long_agent_kills.py --out runs/long-agents
    python tests/benchmarks/long_agent_kills.py --out runs/long-agents-unrecorded --record never
    python tests/benchmarks/long_agent_kills.py --out runs/long-agents-before --against COMMIT

With `--against` the run is one of the build of that commit; the agents, the kills and the audit are this tree's.

The environment with its endpoint, the inference server and nats-server are killed -9 in turn, each after a number of
answers that is drawn, in the middle of conversations of a model with random weights. Prints the seconds of generation
that agents had and that came to nothing, those of answers under way (both by the agents' clocks, so that waiting for
the model counts as well), and the audit. Exits with 1 unless each successor came, and, with recorded calls, no answer
that an agent had was lost or sampled again, and nothing was stored twice.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import reversing_agent, talking_agent
from benchmarks.agent_kills import AGAIN, Kill, count_cost
from benchmarks.demo_kills import kill, pids
from benchmarks.recording_endpoint import free_port
from benchmarks.speed.run import tree_of
from integration.audit import Audit, audit

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

RUN = "long-agents"
VICTIMS = (*AGAIN, "nats-server")
ANSWERS_APART = 40, 160
CONFIG = """
run = "{run}"
model = "model"
[environments.words]
kind = "agent"
samples = 4
max_new_tokens = 12
longest_tokens = 8192
concurrency = 2
record = "{record}"
[environments.words.params]
command = ["{python}", "-S", "{agent}"]
path = "tasks.jsonl"
task_params = {{ answer = "" }}
reward = "program"
port = {port}
token_file = "sessions.token"
variables = {{ NOTES = "{notes}" }}
[batching]
batch_size = 8
[evaluate]
held_out = 0
[training]
steps = 1000
[training.learner]
learning_rate = 1e-9
[flow]
lease_s = 10.0
"""


class Notes:
    """What the agents noted. Those of a trial before the run are of other processes than `lives`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.lives = set[int]()

    def read(self) -> list[dict[str, Any]]:
        lines = self._place.read_bytes().splitlines() if self._place.exists() else []
        return [note for note in map(json.loads, lines) if self.lives.intersection(note["parents"])]

    def wait_for(self, answers: int, up: "subprocess.Popen[bytes]") -> None:
        """Wait until there are so many answers more."""
        wanted = self._answers() + answers
        while self._answers() < wanted:
            if up.poll() is not None:
                sys.exit(f"the run ended with code {up.returncode}")
            time.sleep(0.1)

    def _answers(self) -> int:
        return sum("answered" in note for note in self.read())

    def conversations(self) -> dict[str, tuple[str, ...]]:
        """Return by the key of each session what the model said, as its newest agent got it."""
        said: dict[str, dict[str, str]] = defaultdict(dict)
        for note in self.read():
            if "answered" in note:
                said[note["key"]][note["answered"]] = note["text"]
        return {key: tuple(texts.values()) for key, texts in said.items()}


def kill_at_random(folder: Path, up: "subprocess.Popen[bytes]", notes: Notes, rounds: int, seed: int) -> list[Kill]:
    """Kill each kind of process once a round, in an order that is drawn. Exits if a successor does not come."""
    draw, kills = random.Random(seed), list[Kill]()
    while not (folder / "pids.json").exists() or VICTIMS[0] not in pids(folder):
        if up.poll() is not None:
            sys.exit(f"the run ended with code {up.returncode}")
        time.sleep(0.1)
    for _ in range(rounds):
        for name in draw.sample(VICTIMS, len(VICTIMS)):
            notes.lives.add(pids(folder)[VICTIMS[0]])
            notes.wait_for(draw.randint(*ANSWERS_APART), up)
            kills.append(Kill(name, time.time()))
            if not kill(folder, name):
                sys.exit(f"{name} did not come back")
    notes.lives.add(pids(folder)[VICTIMS[0]])
    notes.wait_for(8 * talking_agent.TURNS, up)  # what was under way at the last kill ends, or begins again
    return kills


async def read_records(folder: Path) -> tuple[Audit, list[RolloutGroup]]:
    async with (
        EmbeddedServer(folder / "nats") as server,
        await connect(server.url, run=RUN, name="audit", token=server.token) as bus,
    ):
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
            groups = [decode(RolloutGroup, message.data) async for message in messages]
        return await audit(bus, RUN), groups


@contextmanager
def build_of(commit: str | None) -> Iterator[dict[str, str]]:
    """Yield the environment variables of processes of a commit's build; None: of this tree's."""
    if commit is None:
        yield dict(os.environ)
        return
    with tree_of(commit) as tree:
        yield {**os.environ, "PYTHONPATH": str(tree / "src")}


def main() -> None:
    arguments = parse()
    place: Path = arguments.out.absolute()
    place.mkdir(parents=True)
    policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=2048)
    with torch.no_grad():  # one with random weights would seldom end a turn
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 40
    save_policy(policy, place / "model")
    (place / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {one}"}) + "\n" for one in range(1000)))
    shutil.copy(reversing_agent.__file__, place)
    agent, notes, folder = shutil.copy(talking_agent.__file__, place), Notes(place / "notes"), place / "runs" / RUN
    given = {"run": RUN, "record": arguments.record, "python": sys.executable, "agent": agent, "port": free_port()}
    (place / "run.toml").write_text(CONFIG.format(**given, notes=place / "notes"))
    command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
    with build_of(arguments.against) as variables:
        with (place / "up.log").open("wb") as log:
            up = subprocess.Popen(command, cwd=place, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            kills = kill_at_random(folder, up, notes, arguments.rounds, arguments.seed)
        finally:
            up.terminate()
            up.wait()
    found, groups = anyio.run(read_records, folder)
    stored = Counter(
        tuple(message.content for message in talk if message.role == "assistant")
        for group in groups
        for talk in group.messages
    )
    keys = {key for key, said in notes.conversations().items() if said in stored}
    cost = count_cost(notes.read(), keys, kills)
    doubled = len(groups) - len({group.id for group in groups})
    build = f", the build of {arguments.against}" if arguments.against else ""
    print(
        f'record = "{arguments.record}", seed {arguments.seed}{build}: {len(kills)} kills, {cost.answers} answers of '
        "agents"
    )
    print(
        f"generation lost for each kill: {cost.answers_s / len(kills):.2f} s in answers that agents had, "
        f"{cost.interrupted_s / len(kills):.2f} s in answers under way; {cost.sampled_again} sampled again"
    )
    print(f"{len(groups)} groups, {doubled} stored twice; audit: {found}")
    is_lossless = not (cost.answers_s or cost.sampled_again)
    sys.exit(bool(found.violations or doubled or not (is_lossless or arguments.record == "never")))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make and to put the run into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2, help="how often each kind of process is killed")
    parser.add_argument("--against", metavar="COMMIT", help="run the build of this commit")
    parser.add_argument("--record", choices=["auto", "never"], default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
