"""Ids of commits: another key in the stream can neither use one up nor pass its own message off for a commit."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from integration.security.conftest import RUN
from integration.security.secured import Secured, auth_init
from nats.aio.client import Client

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus import consumer_pull
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.pipeline.errors import FencedError
from lachesis.pipeline.runtime.commitlog import CommitLog
from lachesis.schemas import subjects
from lachesis.schemas.annotations import CurriculumEvent
from lachesis.schemas.codec import decode

SUBJECT, STATE = "rl.curriculum.one.live.words", "rl.state.one.curriculum.live.words"
DEAD = "rl.dead.one.live.words"


@pytest.fixture
async def server(tmp_path: Path, streams_config: StreamsConfig) -> AsyncIterator[Secured]:
    auth_init(tmp_path, config=RUN)
    async with Secured(tmp_path, "one", tls=False) as made:
        async with await made.bus(OPERATOR) as operator:
            await operator.ensure_streams(streams_config)
        yield made


async def forge(client: Client, data: bytes, msg_id: str | None = None) -> None:
    """Publish a dead letter with the key of `client`, and wait until the stream holds it."""
    await client.jetstream().publish(DEAD, data, timeout=30, headers={MSG_ID_HEADER: msg_id} if msg_id else None)


async def test_an_id_that_another_key_used_before_is_not_taken_for_stored(server: Secured) -> None:
    async with server.client("scorer") as scorer, await server.bus("curriculum") as bus:
        await forge(scorer, b"forged", "the next one")
        with pytest.raises(FencedError, match="another key of the stream has used up the id of this commit"):
            await bus.commit(SUBJECT, b"mine", expected=0, msg_id="the next one")
        assert await bus.last(subjects.EVENTS, SUBJECT) is None
        stored = await bus.commit(SUBJECT, b"mine", expected=0, msg_id="another")
        assert await bus.commit(SUBJECT, b"mine", expected=0, msg_id="another") == stored, "it was stored before"


async def test_commits_go_on_whatever_ids_others_use_up(server: Secured) -> None:
    async with server.client("scorer") as scorer, await server.bus("curriculum") as bus:
        log, _ = await CommitLog.open(
            bus, CurriculumEvent, lambda event: event.commit, subject=SUBJECT, state_subject=STATE, stage="curriculum",
            term="1-ab",
        )  # fmt: skip
        for index in range(4):
            for name in (f"commit.{SUBJECT}.1-ab.{index}", f"state.{STATE}.1-ab.{index}"):
                await forge(scorer, b"forged", name)
        for index in range(4):
            event = CurriculumEvent(
                run="one", env="words", revision="live", strategy="s", snapshot_id="i",
                commit=log.next_commit({}, f"{index}".encode()), observed=[],
            )  # fmt: skip
            await log.append(event)
        async with bus.read(subjects.EVENTS, [SUBJECT], follow=False) as messages:
            assert [decode(CurriculumEvent, message.data).commit.index async for message in messages] == [0, 1, 2, 3]


def test_an_id_is_the_same_again_and_no_others_tell_it() -> None:
    assert commit_id("a.1") == commit_id("a.1")
    assert len({commit_id(f"a.{n}").rpartition(".")[2] for n in range(100)}) == 100


async def test_an_empty_message_holds_up_no_reader(server: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between accounts it ends the answers of a request; without noticing, a reader waits for lost heartbeats."""
    monkeypatch.setattr(consumer_pull, "_HEARTBEAT_S", 1000.0)
    monkeypatch.setattr(consumer_pull, "_EXPIRES_S", 4000.0)
    async with server.client("scorer") as scorer, await server.bus(OBSERVER) as observer:
        for _ in range(3):
            for data in (b"before", b"", b"after"):
                await forge(scorer, data)
        with anyio.fail_after(60):
            async with observer.read(subjects.EVENTS, [DEAD], follow=False) as messages:
                found = [message.data async for message in messages]
    assert found == [b"before", b"", b"after"] * 3
