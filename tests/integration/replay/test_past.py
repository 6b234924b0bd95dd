"""Training on history and rebuilding it on a real server: digests, a trainer killed (-9), stores that were changed."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from fuzz.examples import group
from integration.copies import copy_streams
from integration.harness import until

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.ledger.checkpoint_state import known_checkpoints
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, ROLLOUT_HEADER, Plan
from lachesis.schemas.replay import RescoreEvent
from lachesis.schemas.rollout import Message, RolloutGroup, Sequences, VersionSpan

RUN = "demo"
SLOWED = Path(__file__).parents[1] / "slowed"
GROUPS = 60
SAMPLES, TOKENS = 4, 6
CONFIG = """
run = "demo"
model = "model"
[environments.sums]
kind = "sums.py:Sums"
[normalization]
window = 16
[batching]
batch_size = 16
[training]
checkpoint_every = 3
[[scoring.raters]]
rater = "integration.replay.judges:bribed"
"""
TAUGHT = """
[teacher]
enabled = true
[training.learner.loss]
teacher_coef = 0.5
"""


class World:
    """A run's folder with a model and a history, and the command line in processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "runs" / RUN / "nats"

    @asynccontextmanager
    async def server(self) -> AsyncIterator[NatsBus]:
        async with (
            EmbeddedServer(self.store, ServerConfig(max_file_bytes=32 << 30)) as server,
            await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
        ):
            await bus.ensure_streams(RunConfig().streams)
            yield bus

    def start(self, *arguments: str, step_s: float = 0.0) -> subprocess.Popen[bytes]:
        """Start a command; where it trains, each step takes `step_s` more."""
        (self.folder / "slowed").write_text(f"trainer {step_s}")
        paths = os.pathsep.join([str(SLOWED), str(Path(__file__).parents[2])])
        return subprocess.Popen(
            [sys.executable, "-m", "lachesis", *arguments, "--config", "run.toml"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths, "SLOWED": str(self.folder / "slowed"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def ended(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
        out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=400))
        return process.returncode, out, err

    async def lachesis(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        got, out, err = await self.ended(self.start(*arguments, "--json"))
        assert got == code, (out + err).decode()
        found: dict[str, Any] = json.loads(out)
        return found

    async def refused(self, *arguments: str) -> str:
        code, _, err = await self.ended(self.start(*arguments))
        assert (code, err.count(b"\n")) == (2, 1), err
        return err.decode()

    async def verdicts(self, *arguments: str, code: int = 0) -> dict[str, str]:
        found = await self.lachesis("reproduce", *arguments, code=code)
        return {finding["check"]: finding["verdict"] for finding in found["findings"]}

    def steps(self, trainer: str) -> int:
        file = self.folder / "runs" / RUN / "trainers" / trainer / "metrics.jsonl"
        return len(file.read_bytes().splitlines()) if file.exists() else 0


async def fill(bus: NatsBus, tokenizer: str) -> None:
    """Store groups of random tokens, some samples wordier than others."""
    draw = np.random.default_rng(1)
    total = SAMPLES * TOKENS
    for n in range(1, GROUPS + 1):
        said = [
            [Message(role="user", content="?"), Message(role="assistant", content=" ".join(["so"] * int(words)))]
            for words in draw.integers(1, 30, SAMPLES)
        ]
        mask = [t % TOKENS > 1 for t in range(total)]
        sequences = Sequences(
            offsets=as_bytes(range(0, total + 1, TOKENS), "int32"),
            tokens=as_bytes(draw.integers(5, 60, total).tolist(), "int32"),
            loss_mask=pack_mask(mask),
            logprobs=as_bytes([-float(4.5 + 0.2 * draw.random()) if learn else 0.0 for learn in mask], "float32"),
            finish_reasons=["stop"] * SAMPLES,
            version_spans=[VersionSpan(i, 0, 0) for i in range(SAMPLES)],
        )
        made = group(id=f"{n:032x}", run=RUN, counter=n, item=str(n), messages=said, sequences=sequences,
                     policy_versions=[f"{n // 10}-first-ab"], tokenizer_hash=tokenizer)  # fmt: skip
        headers = {PLAN_HEADER: Plan.of(made).pack()}
        await bus.publish(subjects.rollout(RUN, "sums"), encode(made), msg_id=made.id, headers=headers)


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> World:
    world = World(tmp_path)
    (tmp_path / "run.toml").write_text(CONFIG)
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, tmp_path / "model")
    async with world.server() as bus:
        await fill(bus, policy.tokenizer_hash)
    return world


def altering(
    subject: str, kind: type[Event], change: Callable[[Any], Any], *, nth: int = 0
) -> Callable[[StoredMessage], bytes]:
    """Return what changes the `nth` message on `subject`, as one who can sign what he stores would."""
    met = 0

    def alter(message: StoredMessage) -> bytes:
        nonlocal met
        if message.subject != subject:
            return message.data
        met += 1
        return encode(change(decode(kind, message.data))) if met == nth + 1 else message.data

    return alter


def nudged(event: Any) -> Any:
    """The last bit of one advantage."""
    at = next(i for i, reward in enumerate(event.rewards) if reward.advantages[0])
    first, *rest = event.rewards[at].advantages
    reward = msgspec.structs.replace(event.rewards[at], advantages=[math.nextafter(first, 9), *rest])
    return event.replace(rewards=[*event.rewards[:at], reward, *event.rewards[at + 1 :]])


def one_byte(rollout: RolloutGroup) -> RolloutGroup:
    """One bit of a sampled token."""
    tokens = bytearray(rollout.sequences.tokens)
    tokens[4 * 3] ^= 1
    return rollout.replace(sequences=msgspec.structs.replace(rollout.sequences, tokens=bytes(tokens)))


@pytest.mark.slow
async def test_what_cannot_be_is_refused_in_one_line(world: World) -> None:
    async with world.server() as bus:
        assert "has no revision 'other'; there are live" in await world.refused("train", "--revision", "other")
        assert "no ledger of trainer 'main'" in await world.refused("reproduce", RUN)
        await world.lachesis("replay", "--revision", "again")
        formed = await world.lachesis("train", "--revision", "again", "--dry-run")
        assert (formed["groups"], formed["steps"]) == (GROUPS, 0)
        assert (await bus.usage(subjects.LEDGER)).messages == 0
        text = await world.refused("train", "--revision", "again", "--from", "7")
        assert "no checkpoint of step 7" in text


@pytest.mark.slow
async def test_a_ledger_that_was_deleted_is_stored_again_at_once(world: World) -> None:
    """However soon: within the time in which the server takes a message with the same id for the same one."""
    async with world.server() as bus:
        await world.lachesis("replay", "--revision", "again")
        first = await world.lachesis("train", "--revision", "again", "--steps", "1")
        await bus.delete_all(subjects.LEDGER, [subjects.ledger(RUN, "again")])
        again = await world.lachesis("train", "--revision", "again", "--steps", "2")
        assert (again["steps"], again["chain"]) == (2, first["chain"])


async def teach(bus: NatsBus) -> None:
    """Store what a teacher that is surer of every token than the policy would give."""
    async with bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
        async for message in messages:
            rollout = decode(RolloutGroup, message.data)
            logprobs = TeacherLogprobs(
                run=RUN, env=rollout.env, group=rollout.id, teacher="t", tokenizer_hash=rollout.tokenizer_hash,
                temperature=1.0, logprobs=as_bytes([-0.5] * rollout.sequences.n_tokens, "float32"),
            )  # fmt: skip
            subject, headers = subjects.logprobs(RUN, subjects.LIVE, rollout.env), {ROLLOUT_HEADER: str(message.seq)}
            await bus.publish_large(subject, encode(logprobs), msg_id=f"t.{message.seq}", headers=headers)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_what_a_teacher_gave_in_the_past_is_learned_from(world: World) -> None:
    config = world.folder / "run.toml"
    async with world.server() as bus:
        await world.lachesis("replay", "--revision", "again")
        plain = await world.lachesis("train", "--revision", "again", "--name", "plain", "--steps", "3")
        config.write_text(CONFIG.replace("[batching]", '[batching]\nteacher = "required"') + TAUGHT)
        assert "no logprobs of the teacher" in await world.refused("train", "--revision", "again", "--name", "taught")
        await teach(bus)
        with_teacher = await world.lachesis("train", "--revision", "again", "--name", "taught", "--steps", "3")
    assert with_teacher["policy_version"].rpartition("-")[2] != plain["policy_version"].rpartition("-")[2]
    folder = world.folder / "runs" / RUN / "trainers"
    for trainer, has_one in (("plain", False), ("taught", True)):
        steps = [json.loads(line) for line in (folder / trainer / "metrics.jsonl").read_text().splitlines()]
        assert len(steps) == 3
        assert all((step.get("teacher/kl") is not None) is has_one for step in steps), steps[0]
    assert set((await world.verdicts("--trainer", "taught")).values()) == {"ok"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_trained_killed_and_rebuilt(world: World, tmp_path: Path) -> None:
    async with world.server():
        await world.lachesis("replay", "--revision", "again")
        whole = await world.lachesis("train", "--revision", "again", "--name", "whole")
        assert whole["finished"]
        assert whole["steps"] == whole["batches"] == GROUPS * SAMPLES // 16
        killed = 0
        for step in (1, 4, 8):
            process = world.start("train", "--revision", "again", step_s=0.5)
            await until(
                lambda step=step, process=process: world.steps("again") > step or process.poll() is not None, 200
            )
            process.send_signal(signal.SIGKILL)
            killed += (await world.ended(process))[0] == -signal.SIGKILL
        assert killed >= 2, "it was over before it was killed"
        again = await world.lachesis("train", "--revision", "again")
        assert again["manifest"] == whole["manifest"]
        assert again["policy_version"].rpartition("-")[2] == whole["policy_version"].rpartition("-")[2]
        assert world.steps("again") == again["steps"]
    every = {"chain", "reports", "batches", "order", "weights"}
    expected = dict.fromkeys(every, "ok")
    assert await world.verdicts(RUN, "--trainer", "again") == expected, "a run that has ended, from its folder"
    kept = known_checkpoints(world.folder / "runs" / RUN / "trainers" / "again" / "checkpoints")  # the newest ones
    oldest = kept[-1][1].step
    assert await world.verdicts(RUN, "--trainer", "again", "--from", str(oldest)) == expected

    rescored = subjects.replay("rescore", RUN, "again", "sums")
    for name, alter, wrong, arguments in [
        ("reward", altering(rescored, RescoreEvent, nudged), {"order"}, ("--batches-only",)),
        ("token", altering(subjects.rollout(RUN, "sums"), RolloutGroup, one_byte, nth=5), {"weights"}, ()),
        ("entry", altering(subjects.ledger(RUN, "again"), LedgerEntry, lambda entry: entry.replace(watermark=3), nth=4),
         {"chain"}, ()),
    ]:  # fmt: skip
        (tmp_path / name).mkdir()
        copy = World(tmp_path / name)
        for file in ("run.toml", "model", f"runs/{RUN}/trainers"):
            (copy.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (copy.folder / file).symlink_to(world.folder / file)
        async with world.server() as source, copy.server() as target:
            assert await copy_streams(source, target, alter) == 1
        found = await copy.verdicts("--trainer", "again", *arguments, code=1)
        assert {check for check, verdict in found.items() if verdict == "fail"} == wrong, name
