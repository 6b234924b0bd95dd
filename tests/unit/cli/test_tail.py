import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.tail import StreamSlice, resolve
from lachesis.services.observe.find import first_seq_of_last


def test_a_kind_means_this_runs() -> None:
    wanted = resolve("score", "demo")
    assert (wanted.filters, wanted.subjects) == ({"EVENTS": ["rl.score.demo.*.*"]}, [])
    assert resolve("heartbeat", "demo").subjects == ["rl.heartbeat.demo.*.*"]
    assert resolve("ledger", "demo").filters == {"LEDGER": ["rl.ledger.demo.*"]}


def test_a_subject_may_span_streams() -> None:
    wanted = resolve("rl.*.demo.>", "other")
    assert wanted.filters["ROLLOUTS"] == ["rl.rollout.demo.*", "rl.promotion.demo.*"]
    assert "rl.score.demo.*.*" in wanted.filters["EVENTS"]
    assert wanted.subjects == ["rl.heartbeat.demo.*.*"]


@pytest.mark.parametrize("subject", ["scores", "rl.score", "rl..x", "rl.>.x", "", "rl.score.>.>", "foo.>"])
def test_a_subject_that_nothing_travels_on_is_refused(subject: str) -> None:
    with pytest.raises(ConfigError, match="nothing travels on"):
        resolve(subject, "demo")


def test_two_beginnings_are_refused() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        StreamSlice(since_start=True, last=3)


@pytest.mark.parametrize(("count", "expected"), [(1, 199), (3, 195), (100, 1), (101, 1), (1000, 1)])
async def test_first_of_last_counts_matching_messages_only(count: int, expected: int) -> None:
    async with MemoryBus() as bus:
        for number in range(200):  # odd sequences are wanted, even ones are not
            subject = subjects.event("score", "r", "live", "b" if number % 2 else "a")
            await bus.publish(subject, b"x", msg_id=str(number))
        wanted = [subjects.event("score", "r", "live", "a")]
        assert await first_seq_of_last(bus, subjects.EVENTS, wanted, count) == expected


async def test_first_of_last_of_an_empty_stream_is_its_first() -> None:
    async with MemoryBus() as bus:
        assert await first_seq_of_last(bus, subjects.EVENTS, ["rl.score.r.*.*"], 5) == 1
