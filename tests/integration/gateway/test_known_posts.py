"""A post that is sent again is known for longer than the server knows its id, and after any restart and trim."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.errors import FencedError
from lachesis.pipeline.extensions.atropos.gateway import known_posts
from lachesis.pipeline.extensions.atropos.gateway.keys import stored_key
from lachesis.pipeline.extensions.atropos.gateway.known_posts import KnownPosts
from lachesis.pipeline.extensions.atropos.gateway.logic.posts import DIGEST_BYTES
from lachesis.pipeline.extensions.atropos.gateway.store import GatewayStore
from lachesis.schemas import subjects
from lachesis.schemas.subjects import ROLLOUTS

RUN = "run"
WORDS = subjects.rollout(RUN, "words")


async def stored(bus: NatsBus, *names: str) -> None:
    for name in names:
        await bus.publish(WORDS, b"x", msg_id=f"{WORDS}.{name}")


async def opened(bus: NatsBus) -> KnownPosts:
    """Return the posts as the next life of the gateway knows them."""
    posts = KnownPosts(bus, RUN, ["words"], await GatewayStore.open(bus, ["words"]))
    await posts.catch_up()
    return posts


def known(posts: KnownPosts, *names: str) -> list[str]:
    return [name for name in names if posts.is_known(f"{WORDS}.{name}")]


@asynccontextmanager
async def saving(posts: KnownPosts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(known_posts, "_SAVE_S", 0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(posts.save)
        yield
        tasks.cancel_scope.cancel()


async def saved(bus: NatsBus, count: int) -> None:
    with anyio.fail_after(30):
        while True:
            entry = await bus.value(stored_key("posts"))
            if entry is not None and len(entry.value) > count * DIGEST_BYTES:
                return
            await anyio.sleep(0.01)


async def test_what_is_stored_is_known_in_every_life_and_to_a_second_gateway(nats_bus: NatsBus) -> None:
    await stored(nats_bus, "a", "b")
    posts = await opened(nats_bus)
    assert known(posts, "a", "b", "c") == ["a", "b"]
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(posts.follow)
            await stored(nats_bus, "c")  # by another gateway
            while not known(posts, "c"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()


async def test_what_was_trimmed_is_known(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    await stored(nats_bus, "a", "b", "c")
    posts = await opened(nats_bus)
    async with saving(posts, monkeypatch):
        await saved(nats_bus, 3)
    await nats_bus.trim(ROLLOUTS, [WORDS], before=3)
    await stored(nats_bus, "d")
    assert known(await opened(nats_bus), "a", "b", "c", "d", "e") == ["a", "b", "c", "d"]


@pytest.mark.slow
async def test_what_a_rolled_back_stream_lost_may_come_again(
    nats_bus: NatsBus, streams_config: StreamsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored(nats_bus, "a", "b", "c")
    posts = await opened(nats_bus)
    async with saving(posts, monkeypatch):
        await saved(nats_bus, 3)
    for regrown in ((), ("a", "x", "y", "z")):
        await nats_bus.delete_stream(ROLLOUTS)
        await nats_bus.ensure_streams(streams_config)
        await stored(nats_bus, *regrown)
        assert known(await opened(nats_bus), "a", "b", "c", "x") == list(regrown[:2])


async def test_they_are_bounded_and_the_oldest_go(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_posts, "MAX_POSTS", 3)
    await stored(nats_bus, *"abcde")
    posts = await opened(nats_bus)
    assert (len(posts), known(posts, *"abcde")) == (3, ["c", "d", "e"])


async def test_of_two_gateways_the_earlier_ends(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_posts, "_SAVE_S", 0.01)
    await stored(nats_bus, "a")
    earlier = await opened(nats_bus)
    later = await opened(nats_bus)
    async with saving(later, monkeypatch):
        await saved(nats_bus, 1)
    with anyio.fail_after(30), pytest.raises(FencedError):
        await earlier.save()
