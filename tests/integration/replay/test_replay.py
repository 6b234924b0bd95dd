"""`lachesis replay` and `compare` as a user runs them, on a real server: killed, paused, and beside the live run."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from fuzz.examples import group
from stages import run_normalizer, run_scorer

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.replay import RescoreEvent
from lachesis.schemas.rollout import Message, Sequences, VersionSpan

RUN = "demo"
KILLS = int(os.environ.get("REPLAY_KILLS", "5"))
"""How often the replay is killed: the more, the more history is made."""
SAMPLES = 64
LIVE = """
run = "demo"
[environments.sums]
kind = "sums.py:Sums"
[normalization]
window = 16
[batching]
batch_size = 64
[[scoring.raters]]
rater = "integration.replay.judges:bribed"
""" + "".join(
    f'[[scoring.promotable]]\nrater = "integration.replay.judges:{name}"\n'
    for name in ("bribed", "first", "second", "third")
)
AGAIN = LIVE + "".join(
    f'[[scoring.raters]]\nrater = "integration.replay.judges:{name}"\n' for name in ("first", "second", "third")
)


class World:
    """A run's server and history, and the command line in processes of its own."""

    def __init__(self, folder: Path, bus: NatsBus) -> None:
        self.folder, self.bus = folder, bus
        for name, text in (("live.toml", LIVE), ("again.toml", AGAIN)):
            (folder / name).write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "lachesis", *arguments, "--config", "again.toml"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    async def ended(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
        out, err = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=200))
        return process.returncode, out, err

    async def lachesis(self, *arguments: str) -> tuple[int, bytes, bytes]:
        return await self.ended(self.start(*arguments))

    async def replay(self, revision: str, *arguments: str) -> dict[str, Any]:
        code, out, err = await self.lachesis("replay", "--revision", revision, "--json", *arguments)
        assert code == 0, err
        result: dict[str, Any] = json.loads(out)
        return result

    async def store(self, count: int, after: int = 0) -> None:
        """Store groups, up to number `count`, of which some samples are right; how many words they have tells nothing
        of that."""
        draw = random.Random(1 + after)
        for n in range(after + 1, count + 1):
            said = [
                [
                    Message(role="user", content=f"what is {n}?"),
                    Message(
                        role="assistant", content=" ".join(["so"] * draw.randrange(30) + [draw.choice(["7", "8"])])
                    ),
                ]
                for _ in range(SAMPLES)
            ]
            mask = [False, True] * SAMPLES
            sequences = Sequences(
                offsets=as_bytes(range(0, 2 * SAMPLES + 1, 2), "int32"),
                tokens=as_bytes(range(2 * SAMPLES), "int32"),
                loss_mask=pack_mask(mask),
                logprobs=as_bytes([-1.0 if learn else 0.0 for learn in mask], "float32"),
                finish_reasons=["stop"] * SAMPLES,
                version_spans=[VersionSpan(i, 0, 0) for i in range(SAMPLES)],
            )
            made = group(id=f"{n:032x}", run=RUN, counter=n, item=str(n), messages=said, task={"answer": "7"},
                         sequences=sequences, policy_versions=["0-first-ab"])  # fmt: skip
            headers = {PLAN_HEADER: Plan.of(made).pack()}
            await self.bus.publish(subjects.rollout(RUN, "sums"), encode(made), msg_id=made.id, headers=headers)

    async def live(self, count: int) -> None:
        """Let the live run score and reward it all, by the bribed rater alone."""
        config = load(run_config_type(), file=self.folder / "live.toml").config
        async with anyio.create_task_group() as tasks:
            services = [Service(self.bus, name, RUN) for name in ("scorer", "normalizer")]
            tasks.start_soon(run_scorer, services[0], config)
            tasks.start_soon(run_normalizer, services[1], config)
            rewarded = 0
            async with self.bus.read(subjects.EVENTS, [subjects.event("reward", RUN, "live")]) as messages:
                async for message in messages:
                    rewarded += len(decode(RewardEvent, message.data).groups)
                    if rewarded == count:
                        break
            for service in services:
                service.drain()

    async def events_digest(self) -> str:
        """Name every byte of the live run's rollouts and annotations."""
        digest = hashlib.sha256()
        for stream in (subjects.EVENTS, subjects.ROLLOUTS):
            async with self.bus.read(stream, [], follow=False) as messages:
                async for message in messages:
                    digest.update(f"{message.subject} {message.seq} {message.time_ns}".encode() + message.data)
        return digest.hexdigest()

    async def replayed(self) -> int:
        """Messages that replays have written."""
        return (await self.bus.usage(subjects.REPLAY)).messages

    async def facts(self, revision: str) -> tuple[list[Any], list[Any]]:
        """Every score and reward of a revision, in order, without stamps."""
        scores, rewards = [], []
        async with self.bus.read(
            subjects.REPLAY, [subjects.replay("rescore", RUN, revision)], follow=False
        ) as messages:
            async for message in messages:
                event = decode(RescoreEvent, message.data)
                scores += [msgspec.structs.replace(score, stamps=[]) for score in event.scores]
                rewards += event.rewards
        return scores, rewards


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with (
        EmbeddedServer(tmp_path / "runs" / RUN / "nats", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(RunConfig().streams)
        yield World(tmp_path, bus)


@pytest.mark.slow
async def test_a_rater_that_the_live_score_missed_is_found_and_the_live_run_is_not_touched(world: World) -> None:
    await world.store(40)
    await world.live(40)
    before = await world.events_digest()
    result = await world.replay("honest", "--max-rate", "400")
    assert (result["groups"], result["finished"]) == (40, True)
    assert (await read_record(world.bus, RUN)).holds == {}
    site, text = world.folder / "report.html", world.folder / "report.md"
    code, out, err = await world.lachesis(
        "compare", "live", "honest", "--json", "--html", str(site), "--markdown", str(text),
        "--fail-if", "at_odds_b>0", "--fail-if", "sign_flips>0.99", "--fail-if", "only_a>0",
    )  # fmt: skip
    assert code == 1
    assert err.decode().splitlines() == ["FAILED: at_odds_b is 1, and at_odds_b > 0 was to fail",
                                         "FAILED: sign_flips is 1, and sign_flips > 0.99 was to fail"]  # fmt: skip
    found = json.loads(out)
    assert [rater["rater"] for rater in found["b"]["raters"] if rater["at_odds"]] == ["bribed"]
    assert found["a"]["alpha"] is None
    assert found["metrics"]["rank_within"] < 0.6
    assert "rater bribed of honest is at odds" in site.read_text()
    assert f"what is {int(found['disputed'][0]['group'], 16)}?" in text.read_text()
    assert await world.events_digest() == before

    code, _, err = await world.lachesis("compare", "live", "other")
    assert (code, err) == (2, b"lachesis: run demo has no revision 'other'; there are live, honest\n")
    code, _, err = await world.lachesis("replay", "--revision", "honest", "--set", "advantage.estimator=grpo")
    assert code == 2
    assert b"advantage.sums.estimator was 'centred', is 'grpo'" in err
    code, _, err = await world.lachesis("replay", "--revision", "none", "--min-step", "9")
    assert code == 2
    assert b"nothing is selected" in err
    await update_record(world.bus, RUN, lambda old: old.replace(trimmed={subjects.ROLLOUTS: 9}))
    code, _, err = await world.lachesis("replay", "--revision", "gone", "--from-seq", "3")
    assert (code, err.count(b"\n")) == (2, 1)
    assert b"kept from sequence 9 on, not from 3" in err


@pytest.mark.slow
async def test_an_interrupted_replay_goes_on_where_it_was(world: World) -> None:
    await world.store(60)
    process = world.start("replay", "--revision", "paused", "--max-rate", "5", "--json")
    async with world.bus.read(subjects.REPLAY, [subjects.replay("rescore", RUN, "paused")]) as messages:
        await anext(aiter(messages))
    process.send_signal(signal.SIGINT)
    code, out, err = await world.ended(process)
    assert code == 130, err
    part = json.loads(out)
    assert 0 < part["groups"] < 60
    assert (await read_record(world.bus, RUN)).holds == {}
    whole, rest = await world.replay("whole"), await world.replay("paused")
    assert (rest["groups"], rest["digest"]) == (60, whole["digest"])
    assert await world.facts("paused") == await world.facts("whole")


@pytest.mark.slow
async def test_a_run_that_has_ended_is_scored_again_from_its_folder(tmp_path: Path) -> None:
    async with (
        EmbeddedServer(tmp_path / "runs" / RUN / "nats", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(RunConfig().streams)
        world = World(tmp_path, bus)
        await world.store(10)
    assert (await world.replay("past"))["groups"] == 10
    code, out, err = await world.lachesis("compare", "past", "past", "--json", "--fail-if", "sign_flips>0")
    assert code == 0, err
    assert json.loads(out)["metrics"]["rank_correlation"] == 1


@pytest.mark.slow
@pytest.mark.timeout(300 + 60 * KILLS)
async def test_killed_at_random_points_it_gives_the_same_bits(world: World) -> None:
    await world.store(100 + 120 * KILLS)
    whole = await world.replay("whole")
    draw = random.Random(KILLS)
    killed = 0
    while killed < KILLS:
        commits = draw.randrange(4)
        before = await world.replayed()
        process = world.start("replay", "--revision", "killed", "--max-rate", "100")
        try:
            while process.poll() is None and await world.replayed() < before + commits:  # noqa: ASYNC110 - elsewhere
                await anyio.sleep(0.002)
            with anyio.move_on_after(draw.random() * (0.1 if commits else 2.0)):
                while await world.replayed() < before + 4:  # noqa: ASYNC110 - it is elsewhere
                    await anyio.sleep(0.002)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        code, _, err = await world.ended(process)
        assert code == -signal.SIGKILL, f"it ended before kill {killed + 1}: make more history. {err.decode()}"
        killed += 1
    facts = await world.facts("killed")
    assert len(facts[0]) < whole["total"], "every kill came before the end"
    result = await world.replay("killed")
    assert (result["finished"], result["digest"]) == (True, whole["digest"])
    assert await world.facts("killed") == await world.facts("whole")
    again = await world.replay("killed")
    assert again["digest"] == whole["digest"]
