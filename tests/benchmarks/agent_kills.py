"""An agent with a tool learns, while the processes that it depends on are killed -9 in turn.

    python tests/benchmarks/agent_kills.py --out runs/agent-kills

A small model, warm-started for a minute or two, is to spell made-up words backward. The agent (`reversing_agent.py`)
knows a base URL and a key. In most of the demonstrations the model does not call the agent's tool, and often slips.
While it is trained, the environment with its endpoint, the inference server, nats-server and the trainer are killed in
turn.

Prints the held-out rate before and after with 95 % intervals, what was killed, the seconds of generation that this cost
(by the agents' clocks, so that waiting for the model counts as well), answers that were sampled again although an agent
had them, and the audit of the streams. Exits with 1 unless the run finished, each successor came, no answer was sampled
again, no rollout stored or trained twice, and the rate rose by 20 points.
"""

import argparse
import base64
import hmac
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import reversing_agent
from benchmarks.demo_kills import kill, pids, wait_for_step
from benchmarks.recording_endpoint import free_port
from integration.audit import Audit, audit

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.environment.spelling_tasks import SpellBackward
from lachesis.pipeline.evaluator.logic.rates import compare, interval_of
from lachesis.pipeline.extensions.endpoint.rendering import tool_text
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tokenizer import EOS, SEPARATOR, common_beginning
from lachesis.pipeline.trainer.config import WarmStartConfig
from lachesis.pipeline.trainer.warmstart import warm_start
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

RUN = "agent-kills"
VICTIMS = ("environment-words", "inference-policy", "nats-server", "trainer")
AGAIN = ("environment-words", "inference-policy")
"""Those whose end interrupts an answer, which is sampled again."""
REQUIRED_POINTS = 20.0
SAMPLES = 8
"""Of a group."""
MAX_ATTEMPTS = 8
"""At a sample, of which a new one begins where a call was lost."""
CALL, CALL_END = '<tool_call>{"name": "reverse", "arguments": {"text": "', '"}}</tool_call>'
CALLS_SHARE, DIRECT_SLIPS, CALL_SLIPS = 0.4, 0.8, 0.15
"""Share of the demonstrations that call the tool, and of the answers with a slip without and with it."""
WARM_STEPS = 350
PARAMS = """
command = ["{python}", "-I", "-S", "{agent}"]
tasks = "spell_backward"
reward = "program"
"""
CONFIG = """
run = "{run}"
model = "model"
seed = {seed}
[environments.words]
kind = "agent"
samples = {samples}
max_new_tokens = 24
longest_tokens = 128
concurrency = 4
[environments.words.params]
port = {port}
token_file = "sessions.token"
task_params = {{ split = "train", size = 8000, min_length = 3, max_length = 5 }}
variables = {{ NOTES = "{notes}" }}
{params}
[evaluation.words]
kind = "agent"
max_new_tokens = 24
concurrency = 4
[evaluation.words.params]
task_params = {{ split = "held_out", size = {items}, min_length = 3, max_length = 5 }}
{params}
[evaluate]
every_steps = 1000
items = {items}
samples = 4
[batching]
batch_size = 64
max_staleness = 2
[training]
steps = {steps}
checkpoint_every = 2
[training.learner]
learning_rate = 3e-4
warmup_steps = 0
[flow]
lease_s = 10.0
"""


def demonstrations(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield what comes before an answer, and the answer: without the tool, or the call and what follows its result."""
    beginning = tool_text(reversing_agent.TOOLS) + SEPARATOR
    for question, answer in SpellBackward(split="warm_start", size=3000, min_length=3, max_length=5).pairs():
        if draw.random() >= CALLS_SHARE:
            yield beginning + question, with_slip(answer, DIRECT_SLIPS, draw)
            continue
        text = with_slip(answer[::-1], CALL_SLIPS, draw)
        call = f"{CALL}{text}{CALL_END}"
        yield beginning + question, call
        yield f"{beginning}{question}{SEPARATOR}{call}{EOS}{text[::-1]}", with_slip(text[::-1], CALL_SLIPS, draw)


def with_slip(word: str, share: float, draw: random.Random) -> str:
    """Return the word, with two neighbouring letters exchanged with that probability."""
    if draw.random() >= share:
        return word
    at = draw.randrange(len(word) - 1)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def make_model(folder: Path, seed: int) -> None:
    """Write the warm-started model. The tools' description, which never changes, is one token of its alphabet."""
    torch.set_num_threads(1)
    pairs = list(demonstrations(random.Random(seed)))
    question = common_beginning(prompt for prompt, _ in pairs).rpartition(SEPARATOR)[2]
    phrases = [tool_text(reversing_agent.TOOLS), question, CALL, CALL_END]
    policy = build_tiny_policy(seed, phrases=phrases)
    losses = warm_start(policy, pairs, WarmStartConfig(seed=seed, slips=0.0, steps=WARM_STEPS))
    print(f"warm start: {len(pairs)} demonstrations, {losses[-1]:.2f} nats a token at last", flush=True)
    save_policy(policy, folder)


class Kill(NamedTuple):
    """`at_s`: Unix time."""

    name: str
    at_s: float


class Records(NamedTuple):
    """What the streams hold after the run."""

    found: Audit
    groups: list[RolloutGroup]
    before: EvalEvent
    after: EvalEvent


class Cost(NamedTuple):
    """What the kills cost the agents: seconds of answers that they had and that came to nothing, of answers that were
    interrupted, and how many answers were sampled again although an agent had the first."""

    answers_s: float
    interrupted_s: float
    sampled_again: int
    answers: int


class Killed(NamedTuple):
    """`lost`: the kills after which no successor came. `lives`: the environment's processes, by id."""

    kills: list[Kill]
    lost: int
    lives: set[int]


def kill_in_turn(folder: Path, up: "subprocess.Popen[bytes]", arguments: argparse.Namespace) -> Killed:
    """Kill one process every few steps, in an order drawn for each round."""
    draw, kills, lost, lives = random.Random(arguments.seed), list[Kill](), 0, set[int]()
    for _ in range(arguments.rounds):
        for name in draw.sample(VICTIMS, len(VICTIMS)):
            wait_for_step(folder, up, arguments.first + len(kills) * arguments.apart)
            lives.add(pids(folder)[VICTIMS[0]])
            kills.append(Kill(name, time.time()))
            lost += not kill(folder, name)
    lives.add(pids(folder)[VICTIMS[0]])
    return Killed(kills, lost, lives)


async def read_records(folder: Path) -> Records:
    async with (
        EmbeddedServer(folder / "nats") as server,
        await connect(server.url, run=RUN, name="audit", token=server.token) as bus,
    ):
        found = await audit(bus, RUN)
        async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
            groups = [decode(RolloutGroup, message.data) async for message in messages]
        async with bus.read(subjects.EVENTS, [subjects.event("eval", RUN, "live")], follow=False) as messages:
            events = [decode(EvalEvent, message.data) async for message in messages]
    events.sort(key=lambda event: event.policy_step)
    return Records(found, groups, events[0], events[-1])


def session_keys(groups: list[RolloutGroup], token: str) -> set[str]:
    """Return the keys of the sessions that the groups may consist of."""
    names = [
        f"{group.id}/{sample}.{attempt}"
        for group in groups
        for sample in range(SAMPLES)
        for attempt in range(MAX_ATTEMPTS)
    ]
    macs = [hmac.digest(token.encode(), name.encode(), "sha256") for name in names]
    return {base64.urlsafe_b64encode(mac).decode().rstrip("=") for mac in macs}


def count_cost(notes: list[dict[str, Any]], stored: set[str], kills: list[Kill]) -> Cost:
    """Compare the agents' notes with the sessions that were stored, `stored` by key."""
    ids: dict[tuple[str, str], list[str]] = defaultdict(list)
    open_: dict[tuple[int, str], dict[str, Any]] = {}
    last = {note["key"]: note["s"] for note in notes}
    answers_s = interrupted_s = 0.0
    answers = 0
    begun: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for note in notes:
        if "asked" in note:
            begun[note["key"]].append((note["s"], note["pid"]))
            open_[note["pid"], note["key"]] = note
            continue
        asked = open_.pop((note["pid"], note["key"]))
        interrupted_s += last_kill_within(kills, asked["s"], note["s"])
        known = ids[note["key"], note["answered"]]
        answers += note["id"] not in known
        known.append(note["id"])
        came_to_nothing = note["key"] not in stored and last[note["key"]] < kills[-1].at_s
        if came_to_nothing:
            answers_s += note["s"] - asked["s"]
    for asked in open_.values():  # a program that was ended; the sample's next one asks the same
        again_s = next((s for s, pid in begun[asked["key"]] if s > asked["s"] and pid != asked["pid"]), asked["s"])
        interrupted_s += last_kill_within(kills, asked["s"], again_s)
    return Cost(answers_s, interrupted_s, sum(len(set(found)) - 1 for found in ids.values()), answers)


def last_kill_within(kills: list[Kill], begun_s: float, ended_s: float) -> float:
    """Return the seconds until the last kill in that time after which an answer is sampled again; 0: there is none."""
    return max((one.at_s - begun_s for one in kills if one.name in AGAIN and begun_s < one.at_s < ended_s), default=0.0)


def rate(event: EvalEvent) -> str:
    low, high = interval_of(event) or (float("nan"), float("nan"))
    return f"{event.avg:.1%} ({low:.1%} to {high:.1%}, greedy {event.greedy or 0.0:.1%})"


def report(records: Records, cost: Cost, kills: list[Kill]) -> bool:
    """Print the figures; return whether all is as it should be."""
    gained = compare(records.before, records.after)
    assert gained is not None
    by_kind = ", ".join(f"{count} of {name}" for name, count in sorted(Counter(one.name for one in kills).items()))
    ids = Counter(group.id for group in records.groups)
    doubled = sum(count - 1 for count in ids.values())
    notes = Counter(word for group in records.groups for word in ("lost_samples", "diverged") if word in group.metadata)
    items, k = records.after.items, records.after.k
    print(f"held-out rate, {items} tasks, {k} answers each: {rate(records.before)} -> {rate(records.after)}")
    print(f"gain: {100 * gained.value:+.1f} points (95 %: +- {196 * gained.error:.1f})")
    print(f"kills: {len(kills)}: {by_kind}")
    print(f"{cost.answers} answers of agents; {cost.sampled_again} sampled again although an agent had them")
    print(
        f"generation lost for each kill: {cost.answers_s / len(kills):.2f} s in answers that agents had, "
        f"{cost.interrupted_s / len(kills):.2f} s in answers under way"
    )
    print(f"{len(ids)} groups, {doubled} stored twice; samples begun again or diverged: {dict(notes) or 'none'}")
    print(f"audit: {records.found}")
    faults = records.found.violations or doubled or cost.sampled_again or not cost.answers
    return not faults and 100 * gained.value >= REQUIRED_POINTS


def main() -> None:
    arguments = parse()
    place: Path = arguments.out.absolute()
    place.mkdir(parents=True)
    if arguments.model is None:
        make_model(place / "model", arguments.seed)
    else:
        shutil.copytree(arguments.model, place / "model")
    agent = Path(shutil.copy(reversing_agent.__file__, place / "agent.py"))
    notes, folder, begun_s = place / "notes.jsonl", place / "runs" / RUN, time.monotonic()
    params = PARAMS.format(python=sys.executable, agent=agent)
    given = {"steps": arguments.steps, "items": arguments.items, "seed": arguments.seed, "params": params}
    (place / "run.toml").write_text(CONFIG.format(run=RUN, samples=SAMPLES, port=free_port(), notes=notes, **given))
    command = [sys.executable, "-m", "lachesis", "up", "--config", "run.toml"]
    with (place / "up.log").open("wb") as log:
        up = subprocess.Popen(command, cwd=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        killed = kill_in_turn(folder, up, arguments)
        code = up.wait()
    finally:
        up.terminate()
        up.wait()
    print(f"run: exit code {code}, {time.monotonic() - begun_s:.0f} s", flush=True)
    records = anyio.run(read_records, folder)
    noted = [json.loads(line) for line in notes.read_bytes().splitlines()]
    # without those of trials before the run
    noted = [note for note in noted if killed.lives.intersection(note["parents"])]
    stored = session_keys(records.groups, (place / "sessions.token").read_text().strip())
    is_well = report(records, count_cost(noted, stored, killed.kills), killed.kills)
    sys.exit(bool(killed.lost or code or not is_well))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to make and to put the run into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="one that an earlier run has made, instead of a warm start")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--items", type=int, default=100, help="held-out tasks")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind of process is killed")
    parser.add_argument("--first", type=int, default=2, help="step at which the first process is killed")
    parser.add_argument("--apart", type=int, default=4, help="steps between two kills")
    return parser.parse_args()


if __name__ == "__main__":
    main()
