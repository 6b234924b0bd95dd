"""The governor on the bus: leases follow the log, a later one ends an earlier one, and no mix of sizes gets stuck."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio
import pytest
from integration.proxy import open_proxy
from stages import run_batcher, run_governor

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.governor.stage import _Follower
from lachesis.pipeline.ledger.chain import PREVIOUS_HEADER, Chain, JoinState, LedgerPosition, make_batch
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import LeaseReply, LeaseRequest, PolicyRecord
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import Batch, GroupRef, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.stage_settings import governor_settings

RUN = "r"


def make_config(*, lease_s: float = 20.0, max_staleness: int = 0, retry_s: float = 0.02) -> RunConfig:
    return RunConfig(
        run=RUN,
        environments={"words": EnvironmentConfig(kind="gateway")},
        batching=BatchingConfig(batch_size=8, max_staleness=max_staleness),
        flow=FlowConfig(lease_s=lease_s, retry_s=retry_s),
    )


@asynccontextmanager
async def governor(bus: Bus, config: RunConfig) -> AsyncIterator[Service]:
    async with open_service(bus, "governor", RUN) as service, anyio.create_task_group() as tasks:
        tasks.start_soon(run_governor, service, config)
        yield service
        tasks.cancel_scope.cancel()


async def ask(bus: Bus, request: LeaseRequest) -> LeaseReply:
    """Ask as a producer does: the request to a governor that is not there yet is repeated."""
    with anyio.fail_after(60):
        while True:
            try:
                subject = subjects.lease(RUN, request.env)
                return decode(LeaseReply, await bus.request(subject, encode(request), timeout_s=2.0))
            except InfrastructureError:
                await anyio.sleep(0.05)


def acquire(sequences: int = 4, env: str = "words") -> LeaseRequest:
    return LeaseRequest(op="acquire", producer="p", env=env, sequences=sequences, bytes=1000)


def renewal(lease: str) -> LeaseRequest:
    return acquire().replace(op="renew", lease=lease)


async def granted(bus: Bus, request: LeaseRequest) -> str:
    with anyio.fail_after(60):
        while True:
            reply = await ask(bus, request)
            if reply.granted and reply.lease:
                return reply.lease
            await anyio.sleep(reply.retry_s or 0.02)


async def publish(bus: Bus, counter: int, sequences: int, lease: str | None, step: int = 0) -> tuple[int, str]:
    plan = Plan(
        group=new_group_id(),
        sequences=sequences,
        samples=sequences,
        tokens=10,
        policy_step=step,
        producer="p",
        epoch=1,
        counter=counter,
        started_ns=1,
        lease=lease,
    )
    headers = {PLAN_HEADER: plan.pack()}
    ack = await bus.publish(subjects.rollout(RUN, "words"), b"payload", msg_id=plan.group, headers=headers)
    return ack.seq, plan.group


async def reward(bus: Bus, counter: int, seq: int, group: str, sequences: int) -> None:
    item = GroupReward(
        group=group,
        seq=seq,
        item="i",
        policy_step=0,
        verdict="trainable",
        scores=[1.0] * sequences,
        rewards=[1.0] * sequences,
        advantages=[1.0] * sequences,
        snapshot="s",
        mean=1.0,
        std=1.0,
        range=1.0,
        n_valid=sequences,
    )
    commit = Commit(term="t", index=counter, cursors={}, delta=b"", crc32=0)
    event = RewardEvent(run=RUN, env="words", revision="live", advantage="grpo", commit=commit, groups=[item])
    await bus.publish(subjects.event("reward", RUN, "live", "words"), encode(event), msg_id=f"reward.{group}")


async def train(bus: Bus, step: int) -> None:
    record = PolicyRecord(run=RUN, version=f"{step}-a-b", weights="w", tokenizer_hash="h", written_ns=1)
    await bus.put(keys.POLICY, encode(record))


async def test_leases_follow_the_log(bus: Bus) -> None:
    config = make_config()
    async with governor(bus, config), anyio.create_task_group() as tasks:
        tasks.start_soon(run_batcher, Service(bus, "batcher", RUN), config)
        groups = []
        for n in range(2):
            lease = await granted(bus, acquire())
            groups.append(await publish(bus, n, 4, lease))
        refused = await ask(bus, acquire())
        assert "8 of 8 sequences are outstanding" in str(refused.reason)
        for n, (seq, group) in enumerate(groups):
            await reward(bus, n, seq, group, 4)
        with anyio.fail_after(60):
            async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition())) as entries:
                assert (await anext(entries)).batch is not None
        assert not (await ask(bus, acquire())).granted  # batched, not trained
        await train(bus, 1)
        await granted(bus, acquire())
        tasks.cancel_scope.cancel()


async def test_foreign_messages_on_the_ledger_hinder_neither_a_start_nor_a_governor_that_runs(bus: Bus) -> None:
    config, ledger = make_config(lease_s=1.0, max_staleness=1), subjects.ledger(RUN, "main")
    batches = 0

    async def train_one() -> None:
        nonlocal batches
        for n in range(2):
            seq, group = await publish(bus, 2 * batches + n, 4, await granted(bus, acquire()), step=batches)
            await reward(bus, 2 * batches + n, seq, group, 4)
        batches += 1
        with anyio.fail_after(60):
            async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition())) as entries:
                while (await anext(entries)).next_batch < batches:
                    pass
        await train(bus, batches)

    @asynccontextmanager
    async def batcher() -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_batcher, Service(bus, "batcher", RUN), config)
            yield
            tasks.cancel_scope.cancel()

    async with governor(bus, config):
        async with batcher():
            await train_one()
        first = await bus.last(subjects.LEDGER, ledger)
        assert first is not None
        await bus.publish(ledger, b"\xc1 nonsense", msg_id="foreign")
        async with batcher():
            await train_one()
    await bus.publish(ledger, first.data, msg_id="an old entry under another name")
    await bus.publish(ledger, b"\xc1 nonsense", msg_id="foreign too")
    async with governor(bus, config), batcher():
        await train_one()


@pytest.mark.parametrize("reported", [0, 1, 3, 9])
async def test_a_start_knows_what_a_trainer_may_take_up_again(bus: Bus, reported: int) -> None:
    """The ledger holds three entries; a report of a ninth is the trainer's trouble, not the governor's."""
    config, chain = make_config(), Chain(RUN, "main", "t")
    seq = 0
    for n in range(3):
        ref = GroupRef(
            group=f"g{n}", seq=5 + n, env="words", sequences=8, tokens=8, policy_step=0, advantages=[1.0] * 8
        )
        state = JoinState(watermark=0, resolved=b"", events_cursor=0, producers={})
        batch = make_batch(n, [ref], 8)
        entry = chain.extend(state, batch=batch, outcomes=[], stamps={}, written_ns=1)
        headers = {PREVIOUS_HEADER: str(seq)}
        seq = (await bus.publish(subjects.ledger(RUN, "main"), encode(entry), msg_id=f"e{n}", headers=headers)).seq
        await bus.publish(subjects.ledger(RUN, "main"), b"nonsense", msg_id=f"foreign {n}")
    if reported:
        report = TrainReport(
            run=RUN,
            trainer="main",
            lineage="a",
            term="t",
            step=reported,
            ledger_index=reported - 1,
            chain="c",
            next_batch=reported,
            policy_version="v",
            checkpoint="c",
        )
        await bus.publish(subjects.state(RUN, "trainer", "live", "main"), encode(report), msg_id="report")
    service = Service(bus, "governor", RUN)
    follower = _Follower(service, governor_settings(config), Governor(config.flow, config.batching, term="t"))
    await follower.catch_up()
    assert follower.position == chain.position
    assert follower.readers.untrained_references.lowest_seqs() == (
        {subjects.ROLLOUTS: 5 + reported} if reported < 3 else {}
    )


async def test_a_restart_grants_nothing_until_earlier_leases_ran_out_and_counts_what_is_stored(bus: Bus) -> None:
    config = make_config(lease_s=4.0)  # figures come once a second
    async with governor(bus, config):
        held = await granted(bus, acquire())
        await publish(bus, 0, 4, await granted(bus, acquire()))
    async with governor(bus, config) as service:
        reply = await ask(bus, acquire())
        assert "started again" in str(reply.reason)
        assert reply.retry_s is not None
        assert 0 < reply.retry_s <= 4.0
        renewed = await ask(bus, renewal(held))
        assert renewed.granted
        with anyio.fail_after(60):
            while service.vitals.metrics.get("flow/outstanding") != 8:
                assert (await ask(bus, renewal(held))).granted
                await anyio.sleep(0.1)
        await granted(bus, acquire())  # once the one without renewals has run out


async def test_a_later_governor_ends_the_earlier_one(bus: Bus) -> None:
    config = make_config()
    with pytest.RaisesGroup(FencedError, flatten_subgroups=True, allow_unwrapped=True):
        async with governor(bus, config):
            await granted(bus, acquire())
            async with governor(bus, config):
                await anyio.sleep_forever()


async def test_hostile_requests_get_an_answer(bus: Bus) -> None:
    async with governor(bus, make_config()):
        await granted(bus, acquire(1))
        answer = decode(LeaseReply, await bus.request(subjects.lease(RUN, "words"), b"\xc1", timeout_s=60.0))
        assert not answer.granted
        assert answer.reason
        await bus.publish(subjects.rollout(RUN, "words"), b"", msg_id="x", headers={PLAN_HEADER: "?"})
        assert (await ask(bus, acquire(1))).granted


@pytest.mark.parametrize(("sizes", "max_staleness"), [([3], 0), ([5], 0), ([3], 1), ([3, 5], 0), ([6, 4], 1)])
async def test_no_mix_of_sizes_gets_stuck(bus: Bus, sizes: list[int], max_staleness: int) -> None:
    config = make_config(max_staleness=max_staleness)
    batches: list[Batch] = []
    steps = 4

    async def produce() -> None:
        n = 0
        while len(batches) < steps:
            size = sizes[n % len(sizes)]
            seq, group = await publish(bus, n, size, await granted(bus, acquire(size)), step=len(batches))
            await reward(bus, n, seq, group, size)
            n += 1

    async with governor(bus, config), anyio.create_task_group() as tasks:
        tasks.start_soon(run_batcher, Service(bus, "batcher", RUN), config)
        tasks.start_soon(produce)
        with anyio.fail_after(60):
            async with aclosing(follow_ledger(bus, RUN, "main", LedgerPosition())) as entries:
                while len(batches) < steps:
                    entry = await anext(entries)
                    if entry.batch is not None:
                        batches.append(entry.batch)
                        await train(bus, len(batches))
        tasks.cancel_scope.cancel()
    assert all(batch.sequences == sum(ref.sequences for ref in batch.groups) <= 8 for batch in batches)
    assert all(batch.complete == (batch.sequences == 8) for batch in batches)
    if sizes == [3, 5]:
        assert all(batch.complete for batch in batches)


async def test_states_that_later_ones_replaced_do_not_fill_the_ledger(bus: Bus) -> None:
    replaced = [subjects.state(RUN, stage, "live", "words") for stage in ("normalizer", "curriculum")]
    kept = [subjects.state(RUN, "trainer", "live", "main")]
    for n in range(3):
        for subject in replaced + kept:
            await bus.publish(subject, bytes(1000), msg_id=f"{subject}.{n}")
    async with governor(bus, make_config()):
        with anyio.fail_after(60):
            while (await bus.usage(subjects.LEDGER)).messages > 2 * 1 + 1 * 3 + 2:  # noqa: ASYNC110  # and term and marks
                await anyio.sleep(0.02)
    for subject in replaced + kept:
        async with bus.read(subjects.LEDGER, [subject], follow=False) as messages:
            found = [message.seq async for message in messages]
        last = await bus.last(subjects.LEDGER, subject)
        assert last is not None
        assert found[-1] == last.seq
        assert len(found) == (1 if subject in replaced else 3)


async def test_a_policy_record_that_cannot_be_read_does_not_end_the_governor(bus: Bus) -> None:
    await bus.put(keys.POLICY, b"\xc1")
    async with governor(bus, make_config()) as service:
        await granted(bus, acquire())
        with anyio.fail_after(60):
            while "policy record" not in str(service.vitals.problems):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        await bus.put(keys.POLICY, b"\xc1")
        await train(bus, 1)
        await granted(bus, acquire())


@pytest.mark.slow
async def test_what_was_used_or_still_runs_while_the_governor_was_cut_off_counts(
    nats_bus: NatsBus, nats_server: EmbeddedServer
) -> None:
    """Longer than leases last. The first to be heard after that is the one that wants more."""
    config = make_config(lease_s=5.0)
    target = int(nats_server.url.rpartition(":")[2])
    async with (
        open_proxy(target) as proxy,
        await connect(f"nats://127.0.0.1:{proxy.port}", run=RUN, name="governor", token=nats_server.token) as cut_off,
        governor(cut_off, config) as service,
    ):
        used, running = [await granted(nats_bus, acquire()) for _ in range(2)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.silence, 1.3 * config.flow.lease_s)
            await publish(nats_bus, 0, 4, used)
        for _ in range(10):
            reply = await ask(nats_bus, acquire())
            assert "8 of 8 sequences are outstanding" in str(reply.reason) or "unknown" in str(reply.reason)
        renewed = await ask(nats_bus, renewal(running))
        assert renewed.granted
        await granted(nats_bus, acquire())  # once the one without renewals has run out
        assert service.vitals.metrics["flow/late"] == 0
        assert (await ask(nats_bus, acquire())).granted is False
