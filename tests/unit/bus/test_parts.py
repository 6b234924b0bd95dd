"""The small parts: background tasks, mailboxes, settings, the in-memory log."""

import anyio
import pytest

from lachesis.pipeline.bus import subscription_buffer
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.bus.streams import definitions
from lachesis.pipeline.bus.subscription_buffer import SubscriptionBuffer
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import BusClosedError, FencedError
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import ROLLOUTS, STREAMS

MATH = subjects.rollout("run", "math")


async def test_background_raises_a_single_error_bare() -> None:
    async def fail() -> None:
        raise FencedError("task")

    with pytest.raises(FencedError, match="body"):  # noqa: PT012
        async with background() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise FencedError("body")
    with pytest.raises(FencedError, match="task"):  # noqa: PT012
        async with background() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()
    with pytest.raises(FencedError, match="task"):  # noqa: PT012
        async with background(), anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()
    async with background() as tasks:
        tasks.start_soon(anyio.sleep_forever)  # ends with the body


async def test_background_keeps_several_errors_together() -> None:
    async def fail() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with background() as tasks:
            tasks.start_soon(fail)
            await anyio.wait_all_tasks_blocked()
            raise ValueError
    assert {type(error) for error in caught.value.exceptions} == {KeyError, ValueError}


async def test_mailbox_fails_after_what_is_unread() -> None:
    mailbox = SubscriptionBuffer(2)
    for i in range(3):
        mailbox.push(StoredMessage("", "s", 0, b"%d" % i, 0))
    mailbox.fail(BusClosedError("closed"))
    assert [(await anext(mailbox)).data for _ in range(2)] == [b"1", b"2"]
    with pytest.raises(BusClosedError):
        await anext(mailbox)


async def test_unread_broadcasts_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscription_buffer, "MAX_UNREAD_BYTES", 10)
    mailbox = SubscriptionBuffer(1024)
    for size in (20, 4, 4, 4):
        mailbox.push(StoredMessage("", "s", 0, bytes(size), 0))
    assert [len((await anext(mailbox)).data) for _ in range(2)] == [4, 4]
    for size in (4, 20):
        mailbox.push(StoredMessage("", "s", 0, bytes(size), 0))
    assert len((await anext(mailbox)).data) == 20, "one that is larger than the bound comes alone"


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="replicas"):
        StreamsConfig(replicas=2)
    with pytest.raises(ConfigError, match="duplicate_window"):
        StreamsConfig(duplicate_window_s=0)
    with pytest.raises(ConfigError, match=r"streams\.ledger_bytes is 0"):
        StreamsConfig(ledger_bytes=0)


def test_definitions_never_drop_silently() -> None:
    wanted = definitions("r", StreamsConfig())
    assert [d["name"] for d in wanted] == ["KV_lachesis_r", *(f"lachesis_r_{kind}" for kind in STREAMS)]
    assert sum(d["max_bytes"] for d in wanted) == StreamsConfig().total_bytes()
    for definition in wanted:
        assert definition["discard"] == "new"
        assert definition["max_age"] == 0
        assert definition["max_bytes"] > 0


async def test_memory_time_can_be_moved_on() -> None:
    async with MemoryBus() as bus:
        await bus.publish(MATH, b"x", msg_id="1")
        async with bus.consume(ROLLOUTS, "scorer", [MATH]) as deliveries:
            for attempt in range(1, 4):
                assert (await anext(deliveries)).attempt == attempt
                bus.advance(31)
        bus.advance(600)
        assert not (await bus.publish(MATH, b"x", msg_id="1")).duplicate  # the window is over


async def test_a_closed_memory_bus_ends_every_wait() -> None:
    bus = MemoryBus()
    ended: list[str] = []

    async def read() -> None:
        with pytest.raises(BusClosedError):
            async with bus.read(ROLLOUTS, []) as reader:
                await anext(aiter(reader))
        ended.append("read")

    async def consume() -> None:
        with pytest.raises(BusClosedError):
            async with bus.consume(ROLLOUTS, "d", []) as deliveries:
                await anext(deliveries)
        ended.append("consume")

    async def listen() -> None:
        with pytest.raises(BusClosedError):
            async with bus.listen("rl.>") as heard:
                await anext(heard)
        ended.append("listen")

    async with anyio.create_task_group() as tasks:
        for task in (read, consume, listen):
            tasks.start_soon(task)
        await anyio.wait_all_tasks_blocked()
        await bus.close()
    assert sorted(ended) == ["consume", "listen", "read"]
    with pytest.raises(BusClosedError):
        await bus.publish(MATH, b"", msg_id="1")
