"""What may be put back, decided from the streams alone; and that done twice, however much later, it is done once."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fuzz.examples import EXAMPLES, GROUP, group

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.memory import memory_bus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.bus.memory.stream import DUPLICATE_WINDOW_S
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.retention.holds import update_record
from lachesis.pipeline.runtime.dead_letters import dead_letter
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GENESIS, LedgerEntry, Outcome, OutcomeKind
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.requeue import RequeueCase, Requeuer, examine

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="sums.py:Sums", samples=2)},
    batching=BatchingConfig(batch_size=2, max_staleness=3),
)


class World:
    """A bus with one dead-lettered rollout on it."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.service = Service(bus, "scorer", "r")

    async def store(self, data: bytes | None = None) -> int:
        headers = {PLAN_HEADER: Plan.of(group()).pack()}
        subject = subjects.rollout("r", "sums")
        return (await self.bus.publish(subject, data or encode(group()), msg_id="g", headers=headers)).seq

    async def settle(self, kind: OutcomeKind | None, *, next_batch: int = 0, watermark: int = 0) -> None:
        outcomes = [Outcome(1, GROUP, kind, 2)] if kind else []
        entry = LedgerEntry(
            run="r", trainer="main", index=0, previous=GENESIS, watermark=watermark, resolved=b"", events_cursor=1,
            outcomes=outcomes, next_batch=next_batch,
        )  # fmt: skip
        await self.bus.publish(subjects.ledger("r", "main"), encode(entry), msg_id="entry")

    async def examine(self, stream: str = subjects.ROLLOUTS, seq: int = 1) -> RequeueCase:
        letter = dead_letter(self.service, await self.bus.get(stream, seq), "data", DataError("a bug"))
        (case,) = await examine(self.bus, CONFIG, [(7, letter), (9, letter)])
        assert case.seq == 9, "the newest letter of a message speaks for it"
        return case


@pytest.fixture
async def world() -> Any:
    async with MemoryBus() as bus:
        yield World(bus)


@pytest.mark.parametrize("kind", ["batched", "stale", "zero_variance", "unscorable", "quarantined", "duplicate"])
async def test_only_a_rollout_that_ended_as_dead_comes_back(world: World, kind: OutcomeKind) -> None:
    await world.store()
    await world.settle(kind)
    assert (await world.examine()).refusal == f"its outcome is {kind}, not dead"


async def test_a_dead_one_comes_back_and_an_old_one_is_known_to_be_stale(world: World) -> None:
    await world.store()
    await world.settle("dead", next_batch=6)  # made by step 3: 3 steps old, which is allowed
    case = await world.examine()
    assert (case.qualifies, case.stale) == (True, False)


async def test_one_too_old_is_told_so(world: World) -> None:
    await world.store()
    await world.settle("dead", next_batch=7)
    case = await world.examine()
    assert (case.qualifies, case.stale) == (True, True)


async def test_foreign_messages_on_the_ledger_are_passed_over(world: World) -> None:
    await world.store()
    await world.bus.publish(subjects.ledger("r", "main"), b"\xc1 nonsense", msg_id="foreign")
    await world.settle("dead", next_batch=7)
    entry = await world.bus.last(subjects.LEDGER, subjects.ledger("r", "main"))
    assert entry is not None
    other = msgspec.structs.replace(decode(LedgerEntry, entry.data), outcomes=[Outcome(1, GROUP, "batched", 2)])
    await world.bus.publish(subjects.ledger("r", "main"), encode(other), msg_id="not the next entry")
    case = await world.examine()
    assert (case.qualifies, case.stale) == (True, True)


@pytest.mark.parametrize(("watermark", "text"), [(0, "no outcome yet"), (1, "gone from the ledger")])
async def test_without_an_outcome_on_record_nothing_comes_back(world: World, watermark: int, text: str) -> None:
    await world.store()
    await world.settle(None, watermark=watermark)
    assert text in str((await world.examine()).refusal)


async def test_what_was_rewarded_is_in_the_statistics_already(world: World) -> None:
    await world.store()
    await world.settle("dead")
    reward = next(event for event in EXAMPLES if isinstance(event, RewardEvent))
    await world.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(reward), msg_id="reward")
    assert "rewarded as well" in str((await world.examine()).refusal)


async def test_what_may_have_been_rewarded_in_trimmed_history_is_left_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes back only as long as nothing stored after it is gone."""
    monkeypatch.setattr(memory_bus, "time", SimpleNamespace(time_ns=count(1).__next__))
    subject = subjects.event("reward", "r", "live", "sums")

    async def event(name: str) -> int:
        return (await world.bus.publish(subject, b"no reward of it", msg_id=name)).seq

    async def refused(trimmed: int) -> str | None:
        await update_record(world.bus, "r", lambda old: old.replace(trimmed={subjects.EVENTS: trimmed}))
        await world.bus.trim(subjects.EVENTS, [subject], before=trimmed)
        return (await world.examine()).refusal

    stays = subjects.event("eval", "r", "live", "sums")  # is never trimmed, so the stream's first message tells nothing
    await world.bus.publish(stays, b"x", msg_id="eval")
    await event("earliest")
    early = await event("early")
    await world.store()
    await world.settle("dead")
    late = await event("late")
    last = await event("last")
    assert await refused(early) is None
    assert "it is no longer known" in str(await refused(late + 1))
    assert "it is no longer known" in str(await refused(last + 1))  # nothing is stored from there on


async def test_what_still_cannot_be_read_stays_where_it_is(world: World) -> None:
    await world.store(b"\xc1")
    await world.settle("dead")
    assert "still cannot be read" in str((await world.examine()).refusal)


async def test_a_body_of_another_environment_stays_where_it_is(world: World) -> None:
    await world.store(encode(group(env="other")))
    await world.settle("dead")
    assert "claims run 'r', env 'other'" in str((await world.examine()).refusal)


@pytest.mark.parametrize("kind", ["reward", "curriculum", "dead"])
async def test_commits_and_letters_are_not_annotations_to_repeat(world: World, kind: subjects.Kind) -> None:
    ack = await world.bus.publish(subjects.event(kind, "r", "live", "sums"), b"\x80", msg_id="x")
    assert "not put back" in str((await world.examine(subjects.EVENTS, ack.seq)).refusal)


async def test_a_message_that_is_gone_is_told_so(world: World) -> None:
    letter = next(event for event in EXAMPLES if isinstance(event, DeadLetter))
    (case,) = await examine(world.bus, CONFIG, [(7, msgspec.structs.replace(letter, seq=99))])
    assert case.refusal
    assert not case.qualifies


async def test_done_again_after_every_duplicate_window_it_is_done_once(world: World) -> None:
    async def grant(_: bytes) -> bytes:
        return encode(LeaseReply(granted=True, lease="l", expires_s=9.0))

    await world.store()
    await world.settle("dead")
    async with world.bus.serve(subjects.lease("r"), grant):
        case = await world.examine()
        stored = await Requeuer(world.service).requeue_case(case)
        again = await Requeuer(world.service).requeue_case(case)  # two at once, of which neither saw the other's
        assert again == stored
    world.bus.advance(2 * DUPLICATE_WINDOW_S)
    later = await world.examine()
    assert (later.done, later.qualifies) == (stored, False)


async def test_nothing_is_stored_without_a_lease(world: World) -> None:
    await world.store()
    await world.settle("dead")
    case = await world.examine()
    world.service.drain()
    with pytest.raises(InfrastructureError, match="before it was admitted"):
        await Requeuer(world.service).requeue_case(case)
    assert (await world.bus.usage(subjects.ROLLOUTS)).messages == 1
