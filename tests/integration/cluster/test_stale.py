"""A replica that lags behind: its readers wait, and none takes its end for the stream's."""

import anyio
import pytest

from lachesis.pipeline.bus import consumer_pull
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.reader import ReadOptions, StreamReader, read
from lachesis.schemas import subjects
from lachesis.schemas.subjects import ROLLOUTS, stream_name

MATH = subjects.rollout("run", "math")


@pytest.fixture
def stale_once(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The next reader's first consumer sees nothing of the stream and says so, as one on a lagging replica does."""
    create, made = StreamReader._create, []

    async def behind(self: StreamReader) -> str:
        if made:
            return await create(self)
        filters, self._filters = self._filters, ["rl.rollout.nobody.nothing"]
        try:
            made.append(await create(self))
        finally:
            self._filters = filters
        return made[0]

    monkeypatch.setattr(StreamReader, "_create", behind)
    monkeypatch.setattr(consumer_pull, "_EXPIRES_S", 4.0)
    return made


async def test_a_read_does_not_end_where_a_lagging_replica_ends(nats_bus: NatsBus, stale_once: list[str]) -> None:
    for i in range(20):
        await nats_bus.publish(MATH, b"%d" % i, msg_id=str(i))
    with anyio.fail_after(60):
        async with nats_bus.read(ROLLOUTS, [subjects.rollout("run")], follow=False) as reader:
            await anyio.sleep(0.2)
            assert not reader.caught_up
            assert [message.seq async for message in reader] == list(range(1, 21))
            assert reader.caught_up
    assert stale_once


async def test_a_read_ends_when_the_rest_was_deleted(nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_pull, "_EXPIRES_S", 4.0)
    for i in range(20):
        await nats_bus.publish(MATH, b"%d" % i, msg_id=str(i))
    reader = StreamReader(
        nats_bus._link, nats_bus._blobs, stream_name("run", ROLLOUTS), [MATH], ReadOptions(follow=False)
    )
    noted = reader.open

    async def open_before_the_purge() -> None:
        await noted()
        await nats_bus.client.request(
            f"$JS.API.STREAM.PURGE.{stream_name('run', ROLLOUTS)}", b""
        )  # by somebody with the `nats` tool

    monkeypatch.setattr(reader, "open", open_before_the_purge)
    with anyio.fail_after(60):
        async with read(reader):
            assert [message.seq async for message in reader] == []
