"""A key that stores `{"v": 4}` ends no process, unless it says in its own heartbeats that it is of a newer build."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from integration.harness import CONFIG as RUN_CONFIG
from integration.harness import RUN as WHOLE_RUN
from integration.harness import SUMS, Run
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init
from stages import run_batcher, run_normalizer

from lachesis.pipeline.access import OBSERVER, OPERATOR, Scope
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import leaves
from lachesis.pipeline.extension import access_of
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.ledger_reader import LedgerReader
from lachesis.pipeline.health.stage import run_health
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import SCHEMA_VERSION, decode
from lachesis.schemas.errors import VersionError
from lachesis.services.preflight.newer_messages import newer_messages
from lachesis.services.stage_settings import health_settings

NEWER = msgspec.msgpack.encode({"v": SCHEMA_VERSION + 1})
CONFIG = RunConfig(
    run="one",
    environments={"words": EnvironmentConfig(kind="reasoning_gym")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    health=HealthConfig(off=["ledger"]),
)
READERS = {
    "batcher": run_batcher,
    "normalizer": run_normalizer,
    "health": lambda service, config: run_health(service, health_settings(config)),
}
FORGED = {
    "scorer": ["rl.score.one.live.words", "rl.dead.one.live.words"],
    "teacher": ["rl.teacher.one.live.words", "rl.dead.one.live.words"],
    "evaluator": ["rl.eval.one.live.words"],
    "environment-words": ["rl.rollout.one.words"],
    "batcher": ["rl.promotion.one.live"],
    "trainer": ["rl.state.one.trainer.live.main"],
}
"""Subjects of others that these stages read, by the identity that may write them."""


@pytest.fixture
async def server(tmp_path: Path, streams_config: StreamsConfig) -> AsyncIterator[Secured]:
    auth_init(tmp_path, config=RUN)
    async with Secured(tmp_path, "one", tls=False) as made:
        async with await made.bus(OPERATOR) as operator:
            await operator.ensure_streams(streams_config)
        yield made


async def run_stage(server: Secured, name: str, main: Callable[[Service, RunConfig], Awaitable[None]]) -> None:
    async with await server.bus(name) as bus:
        await main(Service(bus, name, "one"), CONFIG)


@asynccontextmanager
async def heartbeats(server: Secured, *names: str, newer: bool = False) -> AsyncIterator[None]:
    """Send the heartbeats of services, each with its own key."""

    async def beat(bus: NatsBus, name: str) -> None:
        said = {"v": 1, "run": "one", "service": name, "schema_version": SCHEMA_VERSION + newer}
        while True:
            await bus.broadcast(subjects.heartbeat("one", name, "i"), msgspec.msgpack.encode(said))
            await anyio.sleep(0.1)

    async with AsyncExitStack() as stack, background() as tasks:
        for name in names:
            tasks.start_soon(beat, await stack.enter_async_context(await server.bus(name)), name)
        yield


async def letters(observer: NatsBus, count: int) -> list[DeadLetter]:
    found: list[DeadLetter] = []
    with anyio.fail_after(60):
        async with observer.read(subjects.EVENTS, [subjects.event("dead", "one", "live")]) as messages:
            async for message in messages:
                if message.data == NEWER:
                    continue
                letter = decode(DeadLetter, message.data)
                if letter.stream != subjects.EVENTS:  # a rollout without its header
                    continue
                found.append(letter)
                if len(found) == count:
                    break
    return found


async def test_a_version_that_no_writer_writes_ends_nobody_and_is_named(server: Secured) -> None:
    for identity, places in FORGED.items():
        async with server.client(identity) as client:
            for place in places:
                await client.publish(place, NEWER)
            await client.flush(30)
    wanted = {
        ("normalizer", "rl.score.one.live.words"),
        *((stage, "rl.dead.one.live.words") for stage in ("normalizer", "batcher")),
    }
    async with heartbeats(server, *FORGED), background() as tasks:
        for name, main in READERS.items():
            tasks.start_soon(run_stage, server, name, main)
        async with await server.bus(OBSERVER) as observer:
            found: set[tuple[str, str]] = set()
            count = 0
            while not wanted <= found:
                count += 1
                stored = await letters(observer, count)
                found = {(one.stage, (await observer.get(one.stream, one.seq)).subject) for one in stored}
                assert all(f"schema version {SCHEMA_VERSION + 1}" in one.reason for one in stored)
            named = await newer_messages(observer, CONFIG)
    told = {place for places in FORGED.values() for place in places} - {"rl.rollout.one.words"}  # no scorer runs here
    assert {one.subject for one in named} == told


@pytest.mark.parametrize(
    ("identity", "place", "stage"),
    [
        ("scorer", "rl.dead.one.live.words", "batcher"),
        ("scorer", "rl.score.one.live.words", "normalizer"),
        ("evaluator", "rl.eval.one.live.words", "health"),
    ],
)
async def test_a_newer_build_that_says_so_stops_its_readers(
    server: Secured, identity: str, place: str, stage: str
) -> None:
    async with server.client(identity) as client:
        await client.publish(place, NEWER)
        await client.flush(30)
    with anyio.fail_after(60), pytest.raises((VersionError, BaseExceptionGroup)) as stopped:
        async with heartbeats(server, identity, newer=True):
            await run_stage(server, stage, READERS[stage])
    [text] = {str(error) for error in leaves(stopped.value)}
    assert f"({place}), written by {identity}" in text
    assert "upgrade this service" in text


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_whole_run_trains_on_past_such_messages_by_every_key(tmp_path: Path) -> None:
    folder = tmp_path / "server"
    folder.mkdir()
    auth_init(folder, "--run", WHOLE_RUN, config=RUN_CONFIG.format(sums=SUMS, steps=24))
    scope = Scope(run=WHOLE_RUN, revision="live", trainer="main", environments=("sums",))
    table = access_of(scope)
    alone = {"governor", "batcher", "normalizer", "curriculum", "health", "trainer"}
    async with Secured(folder, WHOLE_RUN, tls=False) as server:
        (tmp_path / "run").mkdir()
        run = Run(tmp_path / "run", 24, server)
        run.start()
        with run:
            await run.wait_for_step(2, 300)
            before = run.pids()
            for identity in (*(set(table) - alone - {OPERATOR, OBSERVER}), *sorted(alone)):
                if identity in alone and before:  # they notice another writer on what is theirs, and start again
                    await run.wait_for_step(run.step() + 2, 300)
                    assert run.pids() == before, "nothing was restarted"
                    before = {}
                async with server.client(identity) as client:
                    for place in table[identity].writes:
                        subject = place.replace(".*.*", ".sums.*").replace("*", "sums").replace(">", "sums.x")
                        await client.publish(subject, NEWER)
                    await client.flush(30)
            assert await run.wait(600) == 0, run.tail()
        async with server.during("audit") as bus:
            reader = LedgerReader(bus, WHOLE_RUN, "main")
            assert not [problem.text for problem in await reader.verify_new_entries() if problem.breaks]
            assert reader.entries
