"""`lachesis dead requeue` as a user runs it, on a real server with real stages: what died once is treated once."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from fuzz.examples import EXAMPLES, group
from integration.audit import audit
from stages import run_batcher, run_governor, run_normalizer, run_scorer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.runtime.dead_letters import REQUEUED_HEADER, dead_letter, publish_dead_letter
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message, RolloutGroup
from lachesis.services.requeue import Requeuer, examine

RUN = "demo"
CONFIG = RunConfig(
    run=RUN,
    environments={"sums": EnvironmentConfig(kind="sums.py:Sums", samples=2)},
    batching=BatchingConfig(batch_size=2, max_staleness=4),
    flow=FlowConfig(lease_s=5.0),
)
FIXED = ScoringConfig(raters=[RaterConfig(rater="exact_match")])


class World:
    """A run's server and stages, and the command line in processes of its own."""

    def __init__(self, folder: Path, bus: NatsBus) -> None:
        self.folder, self.bus = folder, bus
        self.counter = 0

    async def lachesis(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        sets = ("--run", RUN, "--set", "batching.batch_size=2", "--set", "batching.max_staleness=4")
        with anyio.fail_after(120):
            return await anyio.run_process(
                [sys.executable, "-m", "lachesis", "dead", *arguments, *sets], cwd=self.folder, check=False
            )

    async def requeue(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        done = await self.lachesis("requeue", *arguments, "--json")
        assert done.returncode == code, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    async def store(self, **changes: Any) -> tuple[int, RolloutGroup]:
        """Store a group as an environment does. By default only a rater can score it."""
        self.counter += 1
        said = [[Message(role="user", content="q"), Message(role="assistant", content=text)] for text in "ab"]
        unscored = msgspec.structs.replace(group().sequences, rewards={})
        fields = {
            "id": new_group_id(), "run": RUN, "counter": self.counter, "messages": said, "task": {"answer": "a"},
            "sequences": unscored, "policy_versions": ["0-first-ab"],
        }  # fmt: skip
        stored = group(**fields | changes)
        headers = {PLAN_HEADER: Plan.of(stored).pack()}
        subject = subjects.rollout(RUN, stored.env)
        return (await self.bus.publish(subject, encode(stored), msg_id=stored.id, headers=headers)).seq, stored

    @asynccontextmanager
    async def stage(self, name: str, main: Callable[..., Awaitable[None]], config: RunConfig) -> AsyncIterator[Service]:
        async with open_service(self.bus, name, RUN) as service, anyio.create_task_group() as tasks:
            tasks.start_soon(partial(main, service, config))
            yield service
            service.drain()

    async def outcomes(self) -> dict[int, str]:
        found = {}
        async with self.bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")], follow=False) as entries:
            async for message in entries:
                entry = decode(LedgerEntry, message.data)
                found |= {outcome.seq: outcome.kind for outcome in entry.outcomes}
                found |= {ref.seq: "batched" for ref in (entry.batch.groups if entry.batch else ())}
        return found

    async def until_settled(self, *seqs: int) -> dict[int, str]:
        with anyio.fail_after(60):
            while not set(seqs) <= (found := await self.outcomes()).keys():  # noqa: ASYNC110 - the ledger is elsewhere
                await anyio.sleep(0.05)
        return found

    async def rollouts_stored(self) -> list[int]:
        async with self.bus.read(
            subjects.ROLLOUTS, [subjects.rollout(RUN)], headers_only=True, follow=False
        ) as messages:
            return [message.seq async for message in messages]

    async def rollouts(self) -> list[tuple[int, RolloutGroup]]:
        async with self.bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
            return [(message.seq, decode(RolloutGroup, message.data)) async for message in messages]


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with (
        EmbeddedServer(tmp_path / "runs" / RUN / "nats", ServerConfig(max_file_bytes=32 << 30)) as server,
        await connect(server.url, run=RUN, name="tests", token=server.token) as bus,
    ):
        await bus.ensure_streams(CONFIG.streams)
        yield World(tmp_path, bus)


@pytest.mark.slow
async def test_a_rollout_that_died_of_a_bug_is_put_back_and_trained_once(world: World) -> None:
    async with AsyncExitStack() as stages:
        for name, main in (("governor", run_governor), ("normalizer", run_normalizer), ("batcher", run_batcher)):
            await stages.enter_async_context(world.stage(name, main, CONFIG))
        async with world.stage("scorer", run_scorer, CONFIG):  # without raters the first group cannot be scored
            dead, original = await world.store()
            well, _ = await world.store(sequences=group().sequences)  # its environment scored this one
            assert await world.until_settled(dead, well) == {dead: "dead", well: "batched"}

        (looked,) = await world.requeue("--all", "--dry-run")
        assert (looked["message"]["seq"], looked["refused"], looked["stored"]) == (dead, None, None)
        assert len(await world.rollouts()) == 2

        asked = await world.lachesis("requeue", "--all")  # no service answers the question
        assert asked.returncode == 1
        assert b"put 1 of them back?" in asked.stderr
        assert len(await world.rollouts()) == 2

        async with world.stage("scorer", run_scorer, msgspec.structs.replace(CONFIG, scoring=FIXED)):
            (done,) = await world.requeue("--reason", "no raters", "--yes")
            anew = done["stored"]
            assert (await world.until_settled(anew))[anew] == "batched"
            (again,) = await world.requeue("--reason", "no raters", "--yes")
            assert (again["stored"], again["refused"]) == (anew, None)

        stored = await world.rollouts()
        assert [seq for seq, _ in stored] == [dead, well, anew]
        repeated = stored[-1][1]
        assert repeated.sequences == original.sequences
        assert repeated.id != original.id
        assert (repeated.producer, repeated.lease is not None) == ("requeue", True)
        assert repeated.metadata["requeued"]["group"] == original.id
        found = await audit(world.bus, RUN)
        assert (found.violations, found.outcomes) == ([], {"dead": 1, "batched": 2})

        shown = await world.lachesis("requeue", str(done["letter"]), "--dry-run")
        assert shown.returncode == 0
        assert f"put back before, as ROLLOUTS {anew}".encode() in shown.stdout


@pytest.mark.slow
async def test_what_would_count_twice_is_left_alone(world: World) -> None:
    async with AsyncExitStack() as stages:
        for name, main in (
            ("governor", run_governor), ("normalizer", run_normalizer), ("batcher", run_batcher), ("scorer", run_scorer)
        ):  # fmt: skip
            await stages.enter_async_context(world.stage(name, main, CONFIG))
        batched, _ = await world.store(sequences=group().sequences)
        await world.until_settled(batched)
    waiting, _ = await world.store(sequences=group().sequences)  # no stage runs any more
    garbage = (await world.bus.publish(subjects.rollout(RUN, "sums"), b"no rollout", msg_id="garbage")).seq
    commit = (await world.bus.publish(subjects.event("reward", RUN, "live", "sums"), b"bad", msg_id="commit")).seq
    teacher = Service(world.bus, "teacher", RUN)
    for stream, seq in (("ROLLOUTS", batched), ("ROLLOUTS", waiting), ("ROLLOUTS", garbage), ("EVENTS", commit)):
        message = await world.bus.get(stream, seq)
        await publish_dead_letter(teacher, dead_letter(teacher, message, "data", DataError("a bug\x1b[2J")))

    rows = await world.requeue("--stage", "teacher", "--yes")
    assert [row["message"]["seq"] for row in rows] == [batched, waiting, garbage, commit]
    told = [row["refused"] for row in rows]
    assert told[0] == "its outcome is batched, not dead"
    assert told[1].startswith("it has no outcome yet")
    assert told[2].startswith("it has no outcome yet")
    assert "commits of one writer" in told[3]
    assert len(await world.rollouts_stored()) == 3

    (row,) = await world.requeue(str(rows[0]["letter"]), "--yes", code=1)
    assert row["stored"] is None
    for wrong in (("--all", "--env", "none-such"), ("--all", "--kind", "poison")):
        assert await world.requeue(*wrong, "--yes") == []
    for refused in ((), ("999",), ("--all", "--json")):
        done = await world.lachesis("requeue", *refused)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    listed = await world.lachesis("list")
    assert b"a bug" in listed.stdout
    assert b"\x1b" not in listed.stdout


@pytest.mark.slow
async def test_nothing_is_put_back_without_a_governor_and_annotations_need_none(world: World) -> None:
    async with AsyncExitStack() as stages:
        for name, main in (("normalizer", run_normalizer), ("batcher", run_batcher), ("scorer", run_scorer)):
            await stages.enter_async_context(world.stage(name, main, CONFIG))
        dead, _ = await world.store()
        await world.until_settled(dead)
    done = await world.lachesis("requeue", "--all", "--yes", "--wait", "0.5")
    assert done.returncode == 2
    assert b"0 of 1 put back, then none admitted for 0.5 s (governor: " in done.stderr

    score = ScoreEvent(run=RUN, env="sums", revision="live", ensemble="e", raters={}, groups=[])
    subject = subjects.event("score", RUN, "live", "sums")
    seq = (await world.bus.publish(subject, encode(score), msg_id="s")).seq
    normalizer = Service(world.bus, "normalizer", RUN)
    message = await world.bus.get(subjects.EVENTS, seq)
    await publish_dead_letter(normalizer, dead_letter(normalizer, message, "data", DataError("a newer version")))
    for _ in range(2):
        (row,) = await world.requeue("--stage", "normalizer", "--yes")
        again = await world.bus.get(subjects.EVENTS, row["stored"])
        assert (again.subject, again.data) == (subject, encode(score))
    assert (await world.bus.usage(subjects.EVENTS)).last == row["stored"]


async def test_an_id_that_another_environment_used_up_keeps_nothing_out(world: World) -> None:
    requeuer = Requeuer(Service(world.bus, "requeue", RUN))
    case: Any = SimpleNamespace(letter=SimpleNamespace(stream=subjects.ROLLOUTS, seq=7))
    mark = {REQUEUED_HEADER: "ROLLOUTS.7"}
    used = f"requeue.{RUN}.ROLLOUTS.7"
    taken = await world.bus.publish(subjects.rollout(RUN, "other"), b"x", msg_id=used, headers=mark)
    seq = await requeuer._store(case, subjects.rollout(RUN, "sums"), b"back", {})
    assert seq > taken.seq
    assert (await world.bus.get(subjects.ROLLOUTS, seq)).data == b"back"
    assert await requeuer._store(case, subjects.rollout(RUN, "sums"), b"back", {}) == seq, "once"


async def test_another_environment_cannot_say_that_a_rollout_was_put_back(world: World) -> None:
    dead, _ = await world.store()
    example = next(one for one in EXAMPLES if isinstance(one, DeadLetter))
    letter = msgspec.structs.replace(example, run=RUN, stream=subjects.ROLLOUTS, seq=dead)
    mark = {REQUEUED_HEADER: f"ROLLOUTS.{dead}"}
    await world.bus.publish(subjects.rollout(RUN, "other"), b"x", msg_id="forged", headers=mark)
    (case,) = await examine(world.bus, CONFIG, [(1, letter)])
    assert case.done is None
    put_back = await world.bus.publish(subjects.rollout(RUN, group().env), b"x", msg_id="real", headers=mark)
    (case,) = await examine(world.bus, CONFIG, [(1, letter)])
    assert case.done == put_back.seq
