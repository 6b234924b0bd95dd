"""Environment, inference server and broker are killed under an agent of many turns, and no answer is lost.

A real run: the real server, every service a process, a tiny untrained model. Printed: the seconds of generation that a
kill has cost, by sample. `RECORD = "never"` shows what it costs where calls are not recorded.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from integration.audit import audit
from integration.environment import long_talk
from integration.harness import RUN, Run, until
from integration.servers import Supervised

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

VICTIMS = ("environment-sums", "inference-policy", "nats-server")
ROUNDS = 1
RECORD = "auto"
SETS = {
    "environments.sums.kind": f"{long_talk.__file__}:LongTalk",
    "environments.sums.samples": 2,
    "environments.sums.concurrency": 2,
    "environments.sums.max_new_tokens": 200,
    "environments.sums.longest_tokens": 8000,
    "batching.batch_size": 4,
    "evaluate.held_out": 0,
    "training.checkpoint_every": 2,
}


def notes_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_bytes().splitlines()]


async def stored(bus: Bus) -> list[RolloutGroup]:
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN, "sums")], follow=False) as messages:
        return [decode(RolloutGroup, message.data) async for message in messages]


def lost_seconds(notes: list[dict], groups: list[RolloutGroup], kills: list[float]) -> tuple[float, float, set[str]]:
    """Return seconds lost in answers that no group holds, those in turns under way at a kill, and the lost items.

    Of samples that were under way when the last process was killed or before, and have ended since.
    """
    used = {
        (group.item, message.content)
        for group in groups
        for talk in group.messages
        for message in talk
        if message.role == "assistant"
    }
    done = {group.item for group in groups}
    last = {note["begin"]["item"]: note["s"] for note in notes if "begin" in note}
    open_: dict[tuple, float] = {}
    answers = turns = 0.0
    lost = set()
    for note in notes:
        if "begin" in note:
            key = (note["pid"], *note["begin"].values())
            if key in open_:  # the request failed, and the turn began again
                turns += max((kill - open_[key] for kill in kills if open_[key] < kill < note["s"]), default=0.0)
            open_[key] = note["s"]
        elif "end" in note:
            begun = open_.pop((note["pid"], *note["end"].values()))
            gone = note["end"]["item"] in done or last[note["end"]["item"]] < kills[-1]
            if gone and begun < kills[-1] and (note["end"]["item"], note["text"]) not in used:
                answers += note["s"] - begun
                lost.add(note["end"]["item"])
    for begun in open_.values():
        kill = min((kill for kill in kills if kill > begun), default=None)
        turns += 0.0 if kill is None else kill - begun
    return answers, turns, lost


async def test_no_answer_is_lost_and_no_tool_runs_twice(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    params = f'{{ notes = "{notes}" }}'
    sets = {**SETS, "environments.sums.params": params, "environments.sums.record": RECORD}
    run = Run(tmp_path, 1_000_000, Supervised(tmp_path), sets=sets)
    policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=8192)
    with torch.no_grad():  # an untrained model would seldom end a turn
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 40
    save_policy(policy, tmp_path / "model")
    rng, kills = random.Random(7), list[float]()
    with run:
        run.start()
        await run.wait_for_step(1)
        lives = {run.pids()[VICTIMS[0]]}  # notes of others are of trials before the run
        for _ in range(ROUNDS):
            for victim in VICTIMS:
                turns = len(notes_of(notes)) + rng.randrange(20, 60)  # somewhere in the middle of conversations
                await until(lambda turns=turns: len(notes.read_bytes().splitlines()) >= turns, 300)
                pid = run.pids()[victim]
                before = run.step()
                kills.append(time.time())
                os.kill(pid, signal.SIGKILL)
                await run.wait_until_back(victim, pid)
                await run.wait_for_step(before + 1)
                lives.add(run.pids()[VICTIMS[0]])
        await run.wait_for_step(run.step() + 2)
    async with run.servers.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        groups = await stored(bus)
    noted = [note for note in notes_of(notes) if note["pid"] in lives]
    answers, turns, lost = lost_seconds(noted, groups, kills)
    print(
        f"record {RECORD}: {len(kills)} kills, {len(groups)} groups; lost for each kill: {answers / len(kills):.2f} s "
        f"in answers of {len(lost)} groups, {turns / len(kills):.2f} s in turns under way; audit {found}"
    )
    assert found.violations == []
    assert max(Counter(group.id for group in groups).values()) == 1
    rung = Counter(note["rang"] for note in noted if "rang" in note)
    if RECORD == "auto":
        anew = {group.item for group in groups if "lost_samples" in group.metadata}
        twice = {bell for bell, times in rung.items() if times > 1}
        assert not {bell for bell in twice if bell.split()[0] not in anew}, "a tool ran twice for one answer"
        assert not lost - anew, "only a sample whose tool may have run begins again"
