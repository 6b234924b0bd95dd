"""What a key stores on its own subjects counts against its own environment at most, on a server that knows the keys."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init
from nats.aio.client import Client
from stages import run_scorer

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.stage import run_health
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Message
from lachesis.schemas.subjects import EVENTS, ROLLOUTS
from lachesis.services.observe.health import read_health
from lachesis.services.stage_settings import health_settings

WINDOW = 16
UNREADABLE = [b"", b"x", b"\xc1", b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"{}", b"\x80", b"\x1b[2J"]
CONFIG = RunConfig(
    run="one",
    environments={"words": EnvironmentConfig(kind="reasoning_gym"), "far": EnvironmentConfig(kind="gateway")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    health=HealthConfig(window=WINDOW, off=["ledger"]),
)
WRITES = {
    "scorer": {"score", "dead"},
    "teacher": {"teacher", "dead", "logprobs"},
    "normalizer": {"reward", "dead"},
    "curriculum": {"curriculum", "dead"},
    "batcher": {"dead"},
    "health": {"alert"},
    "evaluator": {"eval"},
    "trainer": set(),
    "inference": set(),
    "governor": set(),
    "gateway": set(),
    "environment-words": set(),
    OBSERVER: set(),
}
"""The kinds of annotations that each may store; no other stores any, but for the operator."""


@pytest.fixture
async def server(tmp_path: Path, streams_config: StreamsConfig) -> AsyncIterator[Secured]:
    auth_init(tmp_path, config=RUN)
    async with Secured(tmp_path, "one", tls=False) as made:
        async with await made.bus(OPERATOR) as operator:
            await operator.ensure_streams(streams_config)
        yield made


async def _health(service: Service, config: RunConfig) -> None:
    await run_health(service, health_settings(config))


@asynccontextmanager
async def judging(server: Secured) -> AsyncIterator[NatsBus]:
    """Run the scorer and the health service, each with its own key, and yield the observer's bus."""
    async with AsyncExitStack() as stack, background() as tasks:
        for name, main in (("scorer", run_scorer), ("health", _health)):
            bus = await stack.enter_async_context(await server.bus(name))
            tasks.start_soon(main, Service(bus, name, "one"), CONFIG)
        yield await stack.enter_async_context(await server.bus(OBSERVER))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(60):
        while not await condition():  # noqa: ASYNC110 - what is stored is read
            await anyio.sleep(0.05)


async def letters(bus: NatsBus, env: str) -> list[DeadLetter]:
    async with bus.read(EVENTS, [subjects.event("dead", "one", "live", env)], follow=False) as messages:
        return [decode(DeadLetter, message.data) async for message in messages]


async def send(client: Client, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
    await client._send_publish(subject, "", data, len(data), headers)


def stray(lab: Any, env: str) -> list[tuple[bytes, dict[str, str] | None]]:
    """What is no rollout generated under a lease: without the header, with a malformed one, without the lease."""
    group = lab.group(1, env=env)
    plain = {PLAN_HEADER: Plan.of(group).pack()}
    assert plain[PLAN_HEADER].endswith(" -"), "no lease"
    large = {LARGE_HEADER: f"rl.blob.rollout.one.{env}.{'0' * 32}"}
    headers = [
        None,
        {},
        plain,
        {PLAN_HEADER: ""},
        {PLAN_HEADER: "1 x"},
        {PLAN_HEADER: "x" * 9000},
        large,
        large | plain,
    ]
    return list(itertools.product(UNREADABLE, headers))


def leased(lab: Any, env: str, number: int, *, claims: str | None = None) -> tuple[bytes, dict[str, str]]:
    """Return a group of `env` with the header of one; `claims`: the environment that it says it is of."""
    said = [[Message(role="assistant", content=str(sample % 2))] for sample in range(2)]
    group = lab.group(
        number, id=new_group_id(), env=claims or env, lease=f"lease-{number}", messages=said, task={"answer": "1"}
    )
    return encode(group), {PLAN_HEADER: Plan.of(group).pack()}


@pytest.mark.slow
async def test_unreadable_messages_halt_whose_key_stored_them_and_nobody_else(
    server: Secured, make_lab: Callable[..., Any]
) -> None:
    lab = make_lab(None)
    lab.run = "one"
    async with (
        judging(server) as observer,
        server.client("environment-words") as words,
        server.client("environment-far") as far,
    ):
        strays = stray(lab, "words")
        assert len(strays) >= 4 * WINDOW
        for data, headers in strays:
            await send(words, subjects.rollout("one", "words"), data, headers)
            await send(words, subjects.rollout("one", "far"), data, headers)  # the server refuses these

        async def all_dead() -> bool:
            return len(await letters(observer, "words")) == len(strays)

        await until(all_dead)
        assert not any(letter.leased for letter in await letters(observer, "words"))

        for number in range(WINDOW):  # after them, a window of the other's sound groups
            data, headers = leased(lab, "far", number)
            await far.publish(subjects.rollout("one", "far"), data, headers=headers)
        await until_judged(observer, "far")
        assert (await read_health(observer, CONFIG, "words")).groups == 0, "what has no lease counts against nobody"

        for number in range(WINDOW // 2):  # and then what has the header and names a lease, in its own name
            data, headers = leased(lab, "words", number)
            await words.publish(subjects.rollout("one", "words"), UNREADABLE[number], headers=headers)
            data, headers = leased(lab, "words", 100 + number, claims="far")  # and in the other's
            await words.publish(subjects.rollout("one", "words"), data, headers=headers)
            await send(words, subjects.rollout("one", "far"), data, headers)
        await until_judged(observer, "words")
        assert (await read_health(observer, CONFIG, "words")).standing.halted
        assert (await read_health(observer, CONFIG, "words")).standing.cause == "nonfinite"
        assert not (await read_health(observer, CONFIG, "far")).standing.halted
        assert await letters(observer, "far") == []
        assert await stored(server, ROLLOUTS, subjects.rollout("one", "far")) == WINDOW


async def until_judged(observer: NatsBus, env: str) -> None:
    async def judged() -> bool:
        return (await read_health(observer, CONFIG, env)).groups >= WINDOW

    await until(judged)


async def stored(server: Secured, kind: str, pattern: str) -> int:
    async with await server.bus(OBSERVER) as observer, observer.read(kind, [pattern], follow=False) as messages:
        return len([message async for message in messages])


@pytest.mark.parametrize("identity", WRITES)
async def test_a_key_stores_the_annotations_of_its_own_stage_alone(server: Secured, identity: str) -> None:
    kinds = sorted(set().union(*WRITES.values()))
    async with server.client(identity) as client:
        for kind in kinds:
            place = subjects.logprobs("one", "live", "words") if kind == "logprobs" else f"rl.{kind}.one.live.words"
            await send(client, place, identity.encode())
            await send(client, place.replace(".live.", ".other."), identity.encode())
        await client.request("$JS.API.INFO", timeout=30)
    found = set()
    async with await server.bus(OPERATOR) as operator:
        for stream in (EVENTS, subjects.TEACHER):
            found |= set(await operator.stored_subjects(stream, ["rl.>"]))
    assert {subject.split(".")[1] for subject in found} == WRITES[identity]
    assert not [subject for subject in found if ".other." in subject], "revisions of history are the operator's"
