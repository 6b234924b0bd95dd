"""One rollout found in the streams and described, at every point of its way."""

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, DeadLetter, GroupReward, GroupScore, RewardEvent, ScoreEvent, Stamp
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, LedgerEntry, Outcome, StepTimes, TrainReport, VoidBatch
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.observe.endings import Endings
from lachesis.services.observe.find import find_rollout, start_at
from lachesis.services.observe.rollout import Timeline

MS = 1_000_000
CONFIG = RunConfig(run="r")
ENTRY = {"run": "r", "trainer": "main", "previous": "0" * 64, "resolved": b"", "events_cursor": 1}


class World:
    """A bus on which one rollout after the other goes its way. Times are ms after the rollout was begun."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.seqs: dict[str, int] = {}
        self.began_ns: dict[str, int] = {}

    async def rollout(self, group: str | None = None) -> str:
        group = group or new_group_id()
        began_ns = int(group[:12], 16) * MS
        plan = Plan(
            group=group, sequences=4, samples=4, tokens=99, policy_step=3, producer="environment-1", epoch=1,
            counter=len(self.seqs), started_ns=began_ns,
        )  # fmt: skip
        ack = await self.bus.publish(
            subjects.rollout("r", "a"), b"x", msg_id=group + str(len(self.seqs)), headers={PLAN_HEADER: plan.pack()}
        )
        self.seqs[group], self.began_ns[group] = ack.seq, began_ns
        return group

    def stamp(self, group: str, stage: str, *times: int, attempt: int = 1) -> Stamp:
        return Stamp(stage, *(self.began_ns[group] + at * MS for at in times), attempt)

    async def event(self, event: Any, kind: subjects.Kind) -> None:
        await self.bus.publish(subjects.event(kind, "r", "live", "a"), encode(event), msg_id=os.urandom(8).hex())

    async def score(self, group: str) -> GroupScore:
        item = GroupScore(
            group=group, seq=self.seqs[group], item="i", policy_step=3, scores=[1.0], ratings={}, lengths=[1],
            stamps=[self.stamp(group, "scorer", 100, 130, 160)],
        )  # fmt: skip
        await self.event(ScoreEvent(run="r", env="a", revision="live", ensemble="e", raters={}, groups=[item]), "score")
        return item

    async def reward(self, group: str, verdict: Any = "trainable", shaping: Sequence[float] = ()) -> None:
        item = GroupReward(
            group=group, seq=self.seqs[group], item="i", policy_step=3, verdict=verdict, scores=[1.0], rewards=[1.0],
            advantages=[0.5], snapshot="s", mean=0.0, std=1.0, range=1.0, n_valid=1, shaping=list(shaping),
            stamps=self.stamps(group)[:2],
        )  # fmt: skip
        commit = Commit(term="t", index=0, cursors={}, delta=b"", crc32=0)
        await self.event(
            RewardEvent(run="r", env="a", revision="live", advantage="grpo", commit=commit, groups=[item]), "reward"
        )

    def stamps(self, group: str, attempt: int = 1) -> list[Stamp]:
        return [
            self.stamp(group, "scorer", 100, 130, 160, attempt=attempt),
            self.stamp(group, "normalizer", 160, 161, 162),
            self.stamp(group, "batcher", 162, 300, 301),
        ]

    def batched(self, *groups: str, attempt: int = 1) -> LedgerEntry:
        refs = [
            GroupRef(group=g, seq=self.seqs[g], env="a", sequences=4, tokens=99, policy_step=3, advantages=[0.5])
            for g in groups
        ]
        return LedgerEntry(
            **ENTRY, index=5, watermark=0, next_batch=5,  # type: ignore[arg-type]
            batch=Batch(number=4, groups=refs, sequences=4 * len(refs), tokens=99 * len(refs)),
            written_ns=self.began_ns[groups[0]] + 301 * MS, stamps={g: self.stamps(g, attempt) for g in groups},
        )  # fmt: skip

    def settled(self, group: str, kind: Any, reason: str | None = None) -> LedgerEntry:
        return LedgerEntry(
            **ENTRY, index=5, watermark=self.seqs[group], next_batch=4,  # type: ignore[arg-type]
            outcomes=[Outcome(self.seqs[group], group, kind, 4, reason)],
            written_ns=self.began_ns[group] + 200 * MS, stamps={group: self.stamps(group)[:1]},
        )  # fmt: skip

    def report(self, group: str, *, void: str | None = None, steps: bool = True) -> TrainReport:
        began = self.began_ns[group]
        return TrainReport(
            run="r", trainer="main", lineage="a", term="t", step=5, ledger_index=5, chain="0" * 64, next_batch=5,
            policy_version="5-a-b", checkpoint="c", voids=[VoidBatch(4, void)] if void else [],
            steps=[StepTimes(4, began + 400 * MS, began + 900 * MS)] if steps else [],
        )  # fmt: skip

    async def ledger(self, event: Any) -> None:
        subject = subjects.ledger("r", "main")
        if isinstance(event, TrainReport):
            subject = subjects.state("r", "trainer", "live", "main")
        await self.bus.publish(subject, encode(event), msg_id=os.urandom(8).hex())

    async def told(self, name: str, **batching: Any) -> Timeline:
        rollout = await find_rollout(self.bus, CONFIG, name)
        return rollout.timeline(BatchingConfig(**batching), self.began_ns[rollout.plan.group] + 5000 * MS)


@pytest.fixture
async def world(anyio_backend: str) -> AsyncIterator[World]:
    async with MemoryBus() as bus:
        yield World(bus)


async def test_on_its_way_it_waits_for_one_stage_after_the_other(world: World) -> None:
    group = await world.rollout()
    other = await world.rollout()

    async def waits(**batching: Any) -> str | None:
        told = await world.told(group, **batching)
        assert (told.state, told.ended_ns, told.seconds) == ("under way", None, 5.0)
        assert not [span for span in told.spans if span.parent is None], "a rollout that goes on has no root yet"
        return told.waits_for

    assert await waits() == "the scorer"
    await world.score(other)
    assert await waits() == "the scorer"
    await world.score(group)
    assert await waits() == "the normalizer"
    await world.reward(group)
    assert await waits() == "the batcher: a batch that it fits into"
    assert await waits(teacher="optional") == "the teacher"
    assert {span.service for span in (await world.told(group)).spans} == {"environment", "scorer", "normalizer"}

    await world.ledger(world.batched(group))
    told = await world.told(group)
    assert (told.state, told.step, told.waits_for) == ("batched", 5, "the trainer: batch 4")


async def test_without_variance_it_waits_for_a_batch_if_shaping_makes_it_worth_one(world: World) -> None:
    same, shaped = await world.rollout(), await world.rollout()
    await world.reward(same, "zero_variance")
    await world.reward(shaped, "zero_variance", shaping=[0.1])
    for group in (same, shaped):
        await world.score(group)
    assert (await world.told(same)).waits_for == "the batcher, to record the outcome (zero_variance)"
    assert (await world.told(shaped)).waits_for == "the batcher: a batch that it fits into"


async def test_trained_it_shows_what_its_trace_shows(world: World) -> None:
    group = await world.rollout()
    await world.ledger(world.batched(group))
    await world.ledger(world.report(group))
    told = await world.told(group)
    assert (told.state, told.step, told.waits_for, told.seconds) == ("trained", 5, None, 0.9)
    assert [(span.service, span.name.partition(" ")[0]) for span in told.spans] == [
        ("environment", "rollout"), ("environment", "generate"), ("scorer", "queue.wait"), ("scorer", "process"),
        ("normalizer", "queue.wait"), ("normalizer", "process"), ("batcher", "queue.wait"), ("batcher", "process"),
        ("trainer", "queue.wait"), ("trainer", "train.consume"),
    ]  # fmt: skip
    took = {(span.service, span.name.partition(" ")[0]): (span.end_ns - span.start_ns) // MS for span in told.spans}
    assert (took["environment", "generate"], took["scorer", "process"], took["trainer", "train.consume"]) == (
        100, 30, 500,
    )  # fmt: skip


async def test_the_figures_in_the_folder_say_when_a_step_was_taken_that_is_not_reported_yet(
    world: World, tmp_path: Path
) -> None:
    group = await world.rollout()
    await world.ledger(world.batched(group))
    began_ns = world.began_ns[group]
    figures = {"train/step": 5.0, "train/time": began_ns / 1e9 + 0.9, "latency/trainer/proc/p50": 0.2}
    (tmp_path / METRICS_FILE).write_bytes(msgspec.json.encode(figures) + b"\n")
    rollout = await find_rollout(world.bus, msgspec.structs.replace(CONFIG, folder=str(tmp_path)), group)
    told = rollout.timeline(BatchingConfig(), began_ns + 5000 * MS)
    assert (told.state, told.waits_for, told.seconds) == ("trained", None, pytest.approx(0.9))
    assert [span.name for span in told.spans][-2:] == ["queue.wait rl.ledger.{run}.{trainer}", "train.consume"]


async def test_a_report_that_does_not_tell_of_the_step_leaves_its_time_open(world: World) -> None:
    group = await world.rollout()
    await world.ledger(world.batched(group))
    await world.ledger(world.report(group, steps=False))
    told = await world.told(group)
    assert (told.state, told.ended_ns, told.waits_for) == ("trained", None, None)
    assert told.seconds is None, "it has ended: the time until now is none that it took"


async def test_a_void_batch_and_other_outcomes_say_why(world: World) -> None:
    void, stale = await world.rollout(), await world.rollout()
    await world.ledger(world.batched(void))
    await world.ledger(world.report(void, void="payload lost"))
    await world.ledger(world.settled(stale, "stale", "3 steps old"))
    told = await world.told(void)
    assert (told.state, told.reason) == ("void", "payload lost")
    told = await world.told(stale)
    assert (told.state, told.reason, told.seconds, told.waits_for) == ("stale", "3 steps old", 0.2, None)


async def test_a_dead_one_says_who_gave_it_up_and_why(world: World) -> None:
    group = await world.rollout()
    letter = DeadLetter(
        leased=True,
        run="r", env="a", revision="live", stage="scorer", kind="poison", stream="ROLLOUTS", seq=world.seqs[group],
        group=group, reason="it kills", place="scorer 7", time_ns=1, attempts=5,
    )  # fmt: skip
    await world.event(letter, "dead")
    told = await world.told(group)
    assert (told.state, told.waits_for) == ("dead", "the batcher, to record the outcome")
    await world.ledger(world.settled(group, "dead", "scorer, poison: it kills"))
    told = await world.told(group)
    assert (told.state, told.waits_for) == ("dead", None)
    assert told.reason == "scorer, poison, attempt 5: it kills (scorer 7)"
    (root,) = [span for span in told.spans if span.parent is None]
    assert (root.error, root.attributes["rl.outcome"]) == (told.reason, "dead_letter")


async def test_the_beginning_of_an_id_is_enough_where_it_is_the_only_one(world: World) -> None:
    first = await world.rollout("01a000000001" + "7" + "a" * 19)
    second = await world.rollout("01a000000001" + "7" + "b" * 19)
    await world.bus.publish(subjects.rollout("r", "a"), b"no rollout", msg_id="bad")
    await world.bus.publish(subjects.rollout("other", "a"), b"x", msg_id="other")
    assert (await world.told(first[:14].upper())).group == first
    assert (await world.told(second)).group == second
    with pytest.raises(ConfigError, match=r"fits 2 rollouts.*more digits"):
        await world.told("01a0")
    with pytest.raises(NotFoundError, match="not stored yet"):
        await world.told("02")
    for wrong in ("", "xyz", "a" * 33, "*"):
        with pytest.raises(ConfigError, match="no group id"):
            await world.told(wrong)


async def test_any_part_of_an_id_is_enough_where_no_other_has_it(world: World) -> None:
    first = await world.rollout("01a0000000017" + "a" * 9 + "0123456789")
    second = await world.rollout("01a0000000017" + "b" * 10 + "012345678")
    assert (await world.told("A0123456789")).group == first, "the end, which differs most"
    assert (await world.told("bb")).group == second
    assert (await world.told("0017bbb")).group == second
    assert (await world.told("a" * 9 + "0123")).group == first, "as long as a beginning with its time"
    with pytest.raises(ConfigError, match=r"012345678 fits 2 rollouts.*more digits"):
        await world.told("012345678")
    with pytest.raises(NotFoundError, match="with c in it"):
        await world.told("c")


async def test_a_long_stream_is_entered_near_its_end(world: World) -> None:
    times = []
    for number in range(3000):
        subject = subjects.rollout("other" if number % 3 else "r", "a")
        ack = await world.bus.publish(subject, b"x", msg_id=str(number))
        times.append((await world.bus.get(subjects.ROLLOUTS, ack.seq)).time_ns)
    filters = [subjects.rollout("r")]
    for seq in (1, 2, 1976, 1977, 1978, 2999, 3000):
        start = await start_at(world.bus, subjects.ROLLOUTS, filters, times[seq - 1])
        assert start <= seq <= start + 64


async def test_slow_redelivered_and_dead_ones_are_told_as_they_end(world: World) -> None:
    names = [await world.rollout() for _ in range(7)]
    quick, slow, again, dead, barren, old, unknown = names

    def watch(slow_s: float | None) -> Endings:
        endings = Endings("r", slow_s, jaeger_url="http://j/")
        for group in names:
            if group != unknown:
                plan = Plan(
                    group=group, sequences=4, samples=4, tokens=9, policy_step=3, producer="p", epoch=1, counter=1,
                    started_ns=world.began_ns[group] - (60_000 * MS if group == slow else 0),
                )  # fmt: skip
                endings.member(world.seqs[group], "a", plan)
        return endings

    endings = watch(30.0)
    assert endings.entry(world.batched(quick, slow, unknown)) == []
    (told,) = endings.report(world.report(quick))
    assert (told.group, told.why, told.outcome, told.url) == (slow, "slow", "trained", f"http://j/trace/{slow}")
    assert told.seconds == pytest.approx(60.9, abs=0.1)
    assert told.longest == "environment generate"
    assert endings.report(world.report(quick)) == []

    endings = watch(1000.0)
    assert endings.entry(world.batched(quick, again, attempt=2)) == []
    assert [told.why for told in endings.report(world.report(quick))] == ["redelivered", "redelivered"]
    (told,) = endings.entry(world.settled(dead, "dead", "it kills"))
    assert (told.outcome, told.why, told.reason) == ("dead", "failed", "it kills")
    (told,) = endings.entry(world.settled(old, "stale", "9 steps old"))
    assert (told.outcome, told.why, told.reason) == ("stale", "stale", "9 steps old")
    endings = Endings("r", 1000.0, teacher=True)
    plan = Plan(
        group=barren, sequences=4, samples=4, tokens=9, policy_step=3, producer="p", epoch=1, counter=1,
        started_ns=world.began_ns[barren],
    )  # fmt: skip
    endings.member(world.seqs[barren], "a", plan)
    assert endings.entry(world.batched(barren)) == []
    assert [told.why for told in endings.report(world.report(barren))] == ["late"]
    endings = watch(1000.0)
    assert endings.entry(world.settled(barren, "zero_variance")) == []
    assert endings.entry(world.settled(unknown, "dead")) == []
    assert endings._open == {}
