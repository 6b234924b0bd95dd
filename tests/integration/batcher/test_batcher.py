"""The batcher on the bus, in memory and on a real server: exact batches, one outcome each, restarts, fencing."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from stages import run_batcher

from lachesis.pipeline.batcher import stage as stage_module
from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.batcher.whitening import whiten
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig, TeacherConfig
from lachesis.pipeline.errors import FencedError, InfrastructureError, LedgerError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, fetch_groups, follow_ledger
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import (
    Commit,
    GroupReward,
    RewardEvent,
    TeacherEvent,
    TeacherLogprobs,
    TeacherPointer,
    Verdict,
)
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.control import AdmissionStatus
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import epoch_producer, new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import RolloutGroup, Sequences, VersionSpan

RUN, ENV = "r", "words"


def make_config(**batching: Any) -> RunConfig:
    return RunConfig(
        run=RUN,
        batching=BatchingConfig(**{"batch_size": 8, "max_staleness": 50, **batching}),
        teacher=TeacherConfig(enabled="teacher" in batching),
    )


class World:
    """An environment and a normalizer, as far as the batcher sees them."""

    def __init__(self, bus: Bus, run: str = RUN) -> None:
        self.bus, self.run = bus, run
        self.counter = 0
        self.rewards = 0

    async def rollout(self, sequences: int = 4, step: int = 0) -> tuple[int, RolloutGroup]:
        offsets = list(range(0, 2 * sequences + 1, 2))
        group = RolloutGroup(
            id=new_group_id(),
            run=self.run,
            env=ENV,
            item="i",
            producer="p",
            epoch=1,
            counter=self.counter,
            policy_versions=[f"{step}-a-b"],
            sequences=Sequences(
                offsets=as_bytes(offsets, "int32"),
                tokens=as_bytes([1] * 2 * sequences, "int32"),
                loss_mask=pack_mask([False, True] * sequences),
                logprobs=as_bytes([0.0, -1.0] * sequences, "float32"),
                finish_reasons=["stop"] * sequences,
                version_spans=[VersionSpan(i, 0, 0) for i in range(sequences)],
            ),
            tokenizer_hash="h",
            started_ns=1,
        )
        self.counter += 1
        return await self.publish(group, f"rollout.{group.id}"), group

    async def publish(self, group: RolloutGroup, msg_id: str) -> int:
        headers = {PLAN_HEADER: Plan.of(group).pack()}
        subject = subjects.rollout(self.run, ENV)
        return (await self.bus.publish_large(subject, encode(group), msg_id=msg_id, headers=headers)).seq

    async def reward(
        self, *scored: tuple[int, RolloutGroup], verdict: Verdict = "trainable", lengths: Sequence[int] = ()
    ) -> None:
        """Publish rewards in one message. With `lengths` sample i of the group at s has advantage i / s, to whiten."""
        items = [
            GroupReward(
                group=group.id,
                seq=seq,
                item="i",
                policy_step=0,
                verdict=verdict,
                scores=[1.0] * group.sequences.n_samples,
                rewards=[1.0] * group.sequences.n_samples,
                advantages=[i / seq if lengths else 0.5 for i in range(group.sequences.n_samples)],
                snapshot="s",
                mean=1.0,
                std=0.0,
                range=0.0,
                n_valid=group.sequences.n_samples,
                lengths=list(lengths),
            )
            for seq, group in scored
        ]
        self.rewards += 1
        event = RewardEvent(
            run=self.run,
            env=ENV,
            revision="live",
            advantage="grpo",
            commit=Commit(term="t", index=self.rewards, cursors={}, delta=b"", crc32=0),
            groups=items,
        )
        subject = subjects.event("reward", self.run, "live", ENV)
        await self.bus.publish(subject, encode(event), msg_id=f"reward.{self.rewards}")

    async def teach(self, *taught: tuple[int, RolloutGroup]) -> None:
        items = [TeacherPointer(group=group.id, seq=seq, stored=seq) for seq, group in taught]
        event = TeacherEvent(run=self.run, env=ENV, revision="live", teacher="t", groups=items)
        subject = subjects.event("teacher", self.run, "live", ENV)
        await self.bus.publish(subject, encode(event), msg_id=f"teacher.{taught[0][1].id}")


@asynccontextmanager
async def batcher(bus: Bus, config: RunConfig) -> AsyncIterator[Service]:
    """Run a batcher; leaving ends it at whatever line it is, as a kill does."""
    service = Service(bus, "batcher", RUN)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_batcher, service, config)
        yield service
        tasks.cancel_scope.cancel()


async def read_until(bus: Bus, outcomes: int = 0, batches: int = 0) -> list[LedgerEntry]:
    """Return the ledger's entries, as soon as they hold so many outcomes (batched ones too) and batches."""
    entries: list[LedgerEntry] = []
    with anyio.fail_after(60):
        async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition())) as ledger:
            async for entry in ledger:
                entries.append(entry)
                done = sum(len(e.outcomes) + (len(e.batch.groups) if e.batch else 0) for e in entries)
                if done >= outcomes and sum(e.batch is not None for e in entries) >= batches:
                    break
    return entries


def fates(entries: list[LedgerEntry]) -> dict[int, str]:
    found: dict[int, str] = {}
    for entry in entries:
        settled = [(outcome.seq, outcome.kind) for outcome in entry.outcomes]
        settled += [(ref.seq, "batched") for ref in (entry.batch.groups if entry.batch else [])]
        for seq, kind in settled:
            assert seq not in found, f"sequence {seq} has two outcomes"
            found[seq] = kind
    return found


async def test_batches_are_exact_and_their_payloads_come_back(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config()) as service:
        groups = [await world.rollout(sequences) for sequences in (3, 3, 5, 5, 16)]
        await world.reward(*groups)
        entries = await read_until(bus, outcomes=5)
    assert service.vitals.emitted == 5  # groups, not entries
    assert fates(entries)[groups[4][0]] == "oversized"
    batches = [entry.batch for entry in entries if entry.batch]
    assert [batch.sequences for batch in batches] == [8, 8]
    assert [batch.number for batch in batches] == [0, 1]
    assert all(batch.complete for batch in batches)
    assert [[ref.sequences for ref in batch.groups] for batch in batches] == [[3, 5], [3, 5]]
    payloads = await fetch_batch(bus, batches[0])
    assert [group.id for _, group, _ in payloads] == [groups[0][1].id, groups[2][1].id]
    assert entries[-1].totals == {"batched": 4, "batched_sequences": 16, "oversized": 1, "sequences": 32}


async def test_the_ledger_has_advantages_whitened_over_the_batch_and_a_restart_gives_the_same_bits(bus: Bus) -> None:
    world = World(bus)
    config = make_config()
    lengths = [5, 1, 9, 2]
    groups = [await world.rollout() for _ in range(3)]
    async with batcher(bus, config):
        await world.reward(groups[0], lengths=lengths)
        await world.rollout(16)
        await read_until(bus, outcomes=1)
    async with batcher(bus, config):  # knows the first reward from the stream alone
        await world.reward(groups[2], lengths=lengths)
        batch = (await read_until(bus, batches=1))[-1].batch
        await world.reward(groups[1])
        await world.reward(await world.rollout())
        plain = (await read_until(bus, batches=2))[-1].batch
    assert batch
    seqs = [groups[0][0], groups[2][0]]
    assert [ref.seq for ref in batch.groups] == seqs
    expected = whiten([i / seq for seq in seqs for i in range(4)], lengths * 2, config.advantage.std_floor)
    assert [value for ref in batch.groups for value in ref.advantages] == expected
    assert plain
    assert all(ref.advantages == [0.5] * 4 for ref in plain.groups)


async def test_the_ledger_tells_how_long_stale_groups_are(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config(max_staleness=0)) as service:
        groups = [await world.rollout() for _ in range(3)]
        await world.reward(*groups[:2])
        entries = await read_until(bus, batches=1, outcomes=3)
        with anyio.fail_after(60):  # the entry is read before the batcher has heard that it is stored
            while "batching/tokens_per_sequence/stale" not in service.vitals.metrics:  # noqa: ASYNC110 - no event tells
                await anyio.sleep(0.01)
    assert fates(entries)[groups[2][0]] == "stale"
    assert [entry.stale for entry in entries if entry.stale] == [{ENV: [2]}]
    assert service.vitals.metrics["batching/tokens_per_sequence/stale"] == 2.0
    assert service.vitals.metrics["batching/tokens_per_sequence/batched"] == 2.0


async def test_a_payload_that_is_not_what_the_ledger_says_cannot_be_trained(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        groups = [await world.rollout() for _ in range(2)]
        await world.reward(*groups)
        batch = (await read_until(bus, batches=1))[-1].batch
    assert batch
    ref = batch.groups[0]
    teacher = TeacherLogprobs(
        run=RUN,
        env=ENV,
        group=ref.group,
        teacher="t",
        tokenizer_hash="h",
        temperature=1.0,
        logprobs=as_bytes([0.0] * 3, "float32"),
    )
    stored = await bus.publish(subjects.logprobs(RUN, "live", ENV), encode(teacher), msg_id="t")
    for change in ({"seq": batch.groups[1].seq}, {"seq": 10_000}, {"teacher": stored.seq}, {"teacher": 99}):
        kept = {name: getattr(ref, name) for name in ref.__struct_fields__}
        wrong = type(ref)(**{**kept, **change})
        bad = type(batch)(
            number=batch.number, groups=[wrong, *batch.groups[1:]], sequences=batch.sequences, tokens=batch.tokens
        )
        with pytest.raises(DataError):
            await fetch_batch(bus, bad)
        found, failures = await fetch_groups(bus, bad)  # and the others are there
        assert list(failures) == [wrong.seq]
        assert [group.id for _, group, _ in found] == [other.group for other in batch.groups[1:]]


async def test_kills_at_any_moment_leave_every_rollout_one_outcome(bus: Bus) -> None:
    world, rng = World(bus), random.Random(5)
    config = make_config(max_staleness=3)
    published: list[tuple[int, RolloutGroup]] = []
    again: list[int] = []
    repeats: list[int] = []

    async def produce() -> None:
        for n in range(120):
            published.append(await world.rollout(rng.choice([3, 4, 5]), step=n // 12))
            if n % 10 == 9:
                repeats.append(await world.publish(rng.choice(published)[1], f"again.{n}"))
            if n % 5 == 4:
                verdict: Verdict = "zero_variance" if n % 20 == 4 else "trainable"
                again.append(n)
                await world.reward(*rng.sample(published[-5:], 5), verdict=verdict)
            await anyio.sleep(0.001)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        for _ in range(12):
            async with batcher(bus, config):
                await anyio.sleep(rng.uniform(0.0, 0.06))
    async with batcher(bus, config):
        with anyio.fail_after(240):
            while True:
                found = fates([e async for e in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)])
                left = [len(group.sequences) for seq, group in published if seq not in found]
                if not make_a_batch(left) and all(seq in found for seq in repeats):
                    break
                await anyio.sleep(0.02)
    assert {found[seq] for seq in repeats} == {"duplicate"}
    assert set(found) <= {seq for seq, _ in published} | set(repeats)
    entries = [entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]
    batches = [entry.batch for entry in entries if entry.batch]
    assert [batch.number for batch in batches] == list(range(len(batches)))
    for batch in batches:  # smaller than wanted only for a group that no later batch may have
        due = any(batch.number - ref.policy_step == 3 for ref in batch.groups)
        assert batch.sequences == 8 or (due and 8 - 5 < batch.sequences < 8)
    assert all(batch.number - ref.policy_step <= 3 for batch in batches for ref in batch.groups)
    assert entries[-1].totals["batched"] == sum(len(batch.groups) for batch in batches)


def make_a_batch(sizes: list[int]) -> bool:
    """Whether some of the groups make exactly the eight sequences of a batch."""
    sums = {0}
    for size in sizes:
        sums |= {size + other for other in sums}
    return 8 in sums


async def test_a_second_batcher_ends_the_first(bus: Bus) -> None:
    world = World(bus)
    with pytest.RaisesGroup(FencedError, flatten_subgroups=True):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_batcher, Service(bus, "batcher", RUN), make_config())
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=1)
            async with anyio.create_task_group() as later:
                second = Service(bus, "batcher", RUN)
                later.start_soon(run_batcher, second, make_config())
                for batches in count(2):  # once both read along, one of the two is refused
                    await world.reward(*[await world.rollout() for _ in range(2)])
                    await read_until(bus, batches=batches)


async def test_what_cannot_be_read_gets_an_outcome_and_a_letter_and_the_rest_goes_on(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        bad = await bus.publish(subjects.rollout(RUN, ENV), b"?", msg_id="bad", headers={PLAN_HEADER: "1 nonsense"})
        event = await bus.publish(subjects.event("reward", RUN, "live", ENV), b"?", msg_id="bad2")
        good = [await world.rollout() for _ in range(2)]
        await world.reward(*good)
        entries = await read_until(bus, outcomes=3, batches=1)
        with anyio.fail_after(60):
            async with bus.read(subjects.EVENTS, [subjects.event("dead", RUN, "live")]) as letters:
                letter = await anext(aiter(letters))
    assert fates(entries) == {bad.seq: "dead", good[0][0]: "batched", good[1][0]: "batched"}
    assert letter.seq > event.seq


async def test_an_unscored_rollout_is_given_up_at_its_deadline(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config(score_deadline_s=0.2)):
        seq, _ = await world.rollout()
        assert fates(await read_until(bus, outcomes=1)) == {seq: "dead"}


async def test_a_smaller_batch_leaves_only_when_the_governor_knows_that_nothing_else_can_come(bus: Bus) -> None:
    world = World(bus)

    async def say_blocked(last_rollout: int, last_entry: int) -> None:
        status = AdmissionStatus(run=RUN, blocked=True, last_rollout=last_rollout, last_entry=last_entry)
        await bus.broadcast(subjects.admission(RUN), encode(status))

    async def until_ready(service: Service, groups: int, last_rollout: int) -> None:
        with anyio.fail_after(60):
            while service.vitals.metrics.get("batching/ready_groups") != groups:
                await say_blocked(last_rollout, -1)
                await anyio.sleep(0.01)

    async with batcher(bus, make_config()) as service:
        groups = [await world.rollout(3) for _ in range(2)]
        await world.reward(*groups)
        await until_ready(service, 2, groups[0][0])  # the governor knows less than the batcher
        groups.append(await world.rollout(3))
        await world.reward(groups[2])
        await until_ready(service, 3, groups[0][0])
        assert await bus.last(subjects.LEDGER, subjects.ledger(RUN, "main")) is None
        await say_blocked(groups[2][0], 0)  # it knows more: an entry that we have not written
        await anyio.sleep(0.1)
        assert await bus.last(subjects.LEDGER, subjects.ledger(RUN, "main")) is None
        await say_blocked(groups[2][0], -1)
        batch = (await read_until(bus, batches=1))[0].batch
    assert batch
    assert (batch.sequences, batch.complete, len(batch.groups)) == (6, False, 2)


async def test_reading_goes_on_from_a_position_and_refuses_another_history(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        for n in range(3):
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=n + 1)
    entries = await read_until(bus, batches=3)
    position = LedgerPosition()
    for i, entry in enumerate(entries):
        position = position.after(entry)
        rest = [e.index async for e in follow_ledger(bus, RUN, "main", position, follow=False)]
        assert rest == [e.index for e in entries[i + 1 :]]
    for wrong in (LedgerPosition(1, "0" * 64), LedgerPosition(len(entries) + 1, position.digest)):
        with pytest.raises(LedgerError):
            await anext(follow_ledger(bus, RUN, "main", wrong, follow=False))  # before anything is opened
    with pytest.raises(LedgerError, match="where 0 follows"):
        LedgerPosition().after(entries[1])
    with pytest.raises(LedgerError, match="rolled back"):
        LedgerPosition(1, "f" * 64).after(entries[1])


async def test_the_deadline_of_a_batchers_life_before_still_holds(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config(score_deadline_s=0.3)):
        seq, _ = await world.rollout()
    async with batcher(bus, make_config(score_deadline_s=0.3)):
        assert fates(await read_until(bus, outcomes=1)) == {seq: "dead"}


@pytest.mark.parametrize(
    "header",
    [
        f"1 {'a' * 32} 9999999999999999999 1 1 0 1 0 1 p -",  # two of them add up to more than a message can hold
        f"1 {'b' * 32} 4 4 9999999999999999999 0 1 0 1 p -",
        f"1 {'c' * 32} 4 4 8 0 1 0 1 \u00e9 -",  # arrives as a lone surrogate, which no message can hold
    ],
)
async def test_a_header_that_lies_does_not_stop_the_ledger(bus: Bus, header: str) -> None:
    world = World(bus)
    lies = []
    async with batcher(bus, make_config()):
        for n in range(3):
            plan = header.replace(" 0 1 ", f" {n} 1 ")
            ack = await bus.publish(subjects.rollout(RUN, ENV), b"?", msg_id=f"lie{n}", headers={PLAN_HEADER: plan})
            lies.append(ack.seq)
        good = [await world.rollout() for _ in range(2)]
        await world.reward(*good)
        found = fates(await read_until(bus, outcomes=5, batches=1))
    assert found == dict.fromkeys(lies, "dead") | {seq: "batched" for seq, _ in good}


@pytest.mark.parametrize("data", [b"\xc1", msgspec.msgpack.encode({"run": RUN, "blocked": True, "last_rollout": -1})])
async def test_a_status_without_sense_does_not_stop_the_batcher(bus: Bus, data: bytes) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        for n in range(3):  # it listens from the first batch on, at the latest
            await bus.broadcast(subjects.admission(RUN), data)
            await world.reward(*[await world.rollout() for _ in range(2)])
            assert len(await read_until(bus, batches=n + 1)) == n + 1


async def test_a_drain_while_the_server_is_away_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any, **__: Any) -> int:
        raise InfrastructureError("no answer")

    async with MemoryBus() as bus:
        world = World(bus)
        monkeypatch.setattr(bus, "commit", away)
        service = Service(bus, "batcher", RUN)
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_batcher, service, make_config())
                await world.reward(*[await world.rollout() for _ in range(2)])
                while service.vitals.state != "waiting":
                    await bus.changed(until=bus.now() + 0.02)
                service.drain()


async def test_a_local_clock_that_is_ahead_does_not_train_without_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(time_ns=lambda: time.time_ns() + 3600 * 10**9, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(stage_module, "time", ahead)
    async with MemoryBus() as bus:
        world = World(bus)
        async with batcher(bus, make_config(teacher="optional", teacher_deadline_s=30.0)):
            groups = [await world.rollout() for _ in range(2)]
            await world.reward(*groups)
            with anyio.move_on_after(0.3) as waiting:
                await read_until(bus, batches=1)
            assert waiting.cancelled_caught, "trained without waiting for the teacher"
            await world.teach(*groups)
            batch = (await read_until(bus, batches=1))[-1].batch
        assert batch
        assert [ref.teacher for ref in batch.groups] == [seq for seq, _ in groups]


async def test_what_came_before_a_deadline_counts_even_if_its_reader_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryBus() as bus:
        world, read = World(bus), bus.read

        @asynccontextmanager
        async def behind(stream: str, filters: Any, *, follow: bool = True, **options: Any) -> AsyncIterator[Any]:
            async with read(stream, filters, follow=follow, **options) as reader:
                yield _never() if follow and stream == subjects.EVENTS else reader

        monkeypatch.setattr(bus, "read", behind)
        groups = [await world.rollout() for _ in range(2)]
        await world.reward(*groups)
        await world.teach(*groups)
        async with batcher(bus, make_config(teacher="required", teacher_deadline_s=0.3)):
            batch = (await read_until(bus, batches=1))[-1].batch
        assert batch
        assert [ref.teacher for ref in batch.groups] == [seq for seq, _ in groups]


async def _never() -> AsyncIterator[Any]:
    await anyio.sleep_forever()
    yield


async def test_a_rollout_from_a_policy_of_the_far_future_is_dead_and_frees_its_place(bus: Bus) -> None:
    world = World(bus)
    async with batcher(bus, make_config()):
        future = await world.rollout(step=10**9)
        good = [await world.rollout() for _ in range(2)]
        await world.reward(future, *good)
        entries = await read_until(bus, outcomes=3, batches=1)
    assert fates(entries) == {future[0]: "dead", good[0][0]: "batched", good[1][0]: "batched"}


async def test_a_group_that_claims_a_place_in_another_environments_epochs_is_dead(bus: Bus) -> None:
    """Else it would make a duplicate of the group that has that place."""
    world = World(bus)
    async with batcher(bus, make_config()):
        _, group = await world.rollout()
        named = [
            group.replace(id=new_group_id(), producer=epoch_producer(env), epoch=0, counter=counter)
            for env, counter in (("others", 0), (ENV, 0), (ENV, 1), (ENV, 1))
        ]
        seqs = [await world.publish(one, one.id) for one in named]
        await world.reward((seqs[1], named[1]), (seqs[2], named[2]))
        entries = await read_until(bus, outcomes=4, batches=1)
    found = fates(entries)
    assert [found[seq] for seq in seqs] == ["dead", "batched", "batched", "duplicate"]
