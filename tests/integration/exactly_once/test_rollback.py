"""A broker whose store is replaced by an older copy: every part goes on from what is there, or refuses and says why."""

import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from integration.batcher.test_batcher import ENV, RUN, World, batcher, fates, make_config, read_until
from integration.damage import truncate
from integration.harness import trained_in_one_go
from stages import run_batcher, run_curriculum, run_governor, run_normalizer, run_scorer, run_trainer

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig, TrainingConfig
from lachesis.pipeline.errors import HistoryLostError, LedgerError, leaves
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import CurriculumEvent, DeadLetter, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.services.process.service_process import EXIT_STARTUP

from .conftest import SUMS, Site


@pytest.fixture(autouse=True)
def _convinced_soon(monkeypatch):
    monkeypatch.setattr(leader, "BELIEVE_LOSS_S", 0.5)
    yield
    torch.use_deterministic_algorithms(mode=False)


class Broker:
    """A server that can be stopped, its store copied or replaced by the copy, and started again on the same port."""

    def __init__(self, server: EmbeddedServer, copy: Path) -> None:
        self.server = server
        self.copy = copy

    async def save(self) -> None:
        await self.server.stop()
        shutil.copytree(self.server.store, self.copy)
        await self.server.start()

    async def go_back(self, stream: str | None = None) -> None:
        """Replace the store by its copy, or one stream's part of it."""
        await self.server.stop()
        part = (
            next(self.copy.rglob(f"streams/{subjects.stream_name(RUN, stream)}")).relative_to(self.copy)
            if stream
            else Path()
        )
        shutil.rmtree(self.server.store / part)
        shutil.copytree(self.copy / part, self.server.store / part)
        await self.server.start()

    async def connect(self, name: str = "tests"):
        return await connect(self.server.url, run=RUN, name=name, token=self.server.token)


@pytest.fixture
async def broker(tmp_path, streams_config, anyio_backend):
    async with EmbeddedServer(tmp_path / "store", ServerConfig(max_file_bytes=4 << 30)) as server:
        it = Broker(server, tmp_path / "copy")
        async with await it.connect() as bus:
            await bus.ensure_streams(streams_config)
        yield it


CONFIG = msgspec.structs.replace(
    make_config(),
    environments={ENV: EnvironmentConfig(kind=f"{SUMS}:Sums", samples=4)},
    normalization=NormalizationConfig(window=4),
)


async def events(bus, kind, model):
    async with bus.read(subjects.EVENTS, [subjects.event(kind, RUN, "live", ENV)], follow=False) as messages:
        return [decode(model, message.data) async for message in messages]


async def settled(bus):
    return fates([entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)])


async def rewarded(bus):
    return [item.seq for event in await events(bus, "reward", RewardEvent) for item in event.groups]


async def until_learned(bus):
    """Wait until the curriculum has read the newest rewards, which it gathers for a moment."""
    newest = await bus.last(subjects.EVENTS, subjects.event("reward", RUN, "live", ENV))
    with anyio.fail_after(60):
        while (await events(bus, "curriculum", CurriculumEvent))[-1].commit.cursors[subjects.EVENTS] <= newest.seq:  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def scored(bus):
    return {item.group for event in await events(bus, "score", ScoreEvent) for item in event.groups}


STAGES = {"scorer": run_scorer, "normalizer": run_normalizer, "curriculum": run_curriculum, "batcher": run_batcher}


@asynccontextmanager
async def living(broker):
    """All stages, each on a connection of its own; yields those that have ended, by name, each with its error."""
    ends: dict[str, BaseException] = {}
    mains = STAGES | {"governor": run_governor}
    ended = {name: anyio.Event() for name in mains}

    async def live(name, main):
        async with await broker.connect(name) as bus:
            try:
                await main(Service(bus, name, RUN), CONFIG)
            except (LedgerError, BaseExceptionGroup) as error:
                ends[name] = error
                ended[name].set()

    async with anyio.create_task_group() as tasks:
        for name, main in mains.items():
            tasks.start_soon(live, name, main)
        yield ends, ended
        tasks.cancel_scope.cancel()


async def until_settled(bus, seqs):
    with anyio.fail_after(60):
        async with bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")]) as entries:
            while not set(seqs) <= set(await settled(bus)):
                await anext(aiter(entries))


@pytest.mark.slow
async def test_stages_that_live_through_it_end_and_their_next_lives_go_on_with_what_is_there(broker, make_lab):
    made = iter(range(1000))

    async def publish(bus):
        lab = make_lab(bus)
        groups = [lab.group(next(made), env=ENV, samples=4) for _ in range(8)]
        return {await lab.store(group): group for group in groups}

    async with await broker.connect() as bus:
        async with living(broker) as (ends, ended):
            kept = await publish(bus)
            await until_settled(bus, kept)
            await broker.save()
            lost = await publish(bus)
            await until_settled(bus, lost)
            await until_learned(bus)
            assert not ends
            await broker.go_back()
            for name in ("normalizer", "curriculum", "batcher", "governor"):
                with anyio.fail_after(60, reason=f"{name} has not noticed"):
                    await ended[name].wait()
        for name, error in ends.items():
            assert {type(leaf) for leaf in leaves(error)} == {HistoryLostError}, name

    async with await broker.connect() as bus:
        assert set(await settled(bus)) <= set(kept)
        async with living(broker) as (ends, _):
            new = await publish(bus)  # by a producer that has lived through it: its counters go on, with a gap
            data, plan = encode(kept[1]), Plan.of(kept[1]).pack()
            again = await bus.publish(subjects.rollout(RUN, ENV), data, msg_id="another", headers={PLAN_HEADER: plan})
            await until_settled(bus, [*kept, *new, again.seq])
            assert not ends
        assert set(new) & set(lost)  # the same sequences, other rollouts
        assert await settled(bus) == dict.fromkeys([*kept, *new], "batched") | {again.seq: "duplicate"}
        assert set(await rewarded(bus)) >= {*kept, *new}
        assert {group.id for group in (kept | new).values()} <= await scored(bus)
        found = await events(bus, "curriculum", CurriculumEvent)
        assert [event.commit.index for event in found] == list(range(len(found)))


@pytest.mark.slow
@pytest.mark.parametrize("regrown", [False, True])
async def test_rollouts_alone_that_went_back_are_refused(broker, regrown):
    async with await broker.connect() as bus:
        world = World(bus)
        async with batcher(bus, make_config()):
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=1)
        await broker.save()
        async with batcher(bus, make_config()):
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=2)
    await broker.go_back(subjects.ROLLOUTS)
    async with await broker.connect() as bus:
        world.bus = bus
        for _ in range(4 if regrown else 0):
            await world.rollout()
        with pytest.RaisesGroup(HistoryLostError, flatten_subgroups=True, allow_unwrapped=True):
            with anyio.fail_after(60):
                await run_batcher(Service(bus, "batcher", RUN), make_config())


async def went_back_alone(broker, make_lab, stream):
    """Settle sixteen groups and take `stream` back to when there were eight; return what publishes eight more."""
    made = iter(range(1000))

    async def publish(bus):
        lab = make_lab(bus)
        return [await lab.store(lab.group(next(made), env=ENV, samples=4)) for _ in range(8)]

    async with await broker.connect() as bus:
        async with living(broker):
            await until_settled(bus, await publish(bus))
        await broker.save()
        async with living(broker):
            await until_settled(bus, await publish(bus))
    await broker.go_back(stream)
    return publish


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["normalizer", "batcher"])
async def test_rollouts_that_went_back_and_grew_again_under_everything_else_are_refused_by_who_derived_from_them(
    broker, make_lab, monkeypatch, stage
):
    """The rollouts under the old sequences are others: what was derived from the lost ones must not count for them."""
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    publish = await went_back_alone(broker, make_lab, subjects.ROLLOUTS)
    async with await broker.connect(stage) as bus:
        await publish(bus)
        with pytest.RaisesGroup(
            pytest.RaisesExc(HistoryLostError, match=r"another message is stored|holds [0-9a-f]{32}, but"),
            flatten_subgroups=True,
            allow_unwrapped=True,
        ):
            with anyio.fail_after(60):
                await STAGES[stage](Service(bus, stage, RUN), CONFIG)


@pytest.mark.slow
async def test_annotations_that_went_back_and_grew_again_are_refused_by_the_batcher(broker, make_lab, monkeypatch):
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    await went_back_alone(broker, make_lab, subjects.EVENTS)
    async with await broker.connect("batcher") as bus:
        for number in range(200):
            letter = DeadLetter(
                leased=True,
                run=RUN, env=ENV, revision="live", stage="scorer", kind="data", stream=subjects.EVENTS, seq=1,
                group=None, reason="a test", place="here", time_ns=number, trace_id=None,
            )  # fmt: skip
            await bus.publish(subjects.event("dead", RUN, "live", ENV), encode(letter), msg_id=f"letter-{number}")
        with pytest.RaisesGroup(
            pytest.RaisesExc(HistoryLostError, match="batcher has read stream EVENTS up to sequence"),
            flatten_subgroups=True,
            allow_unwrapped=True,
        ):
            with anyio.fail_after(60):
                await run_batcher(Service(bus, "batcher", RUN), CONFIG)


@pytest.mark.parametrize("stage", ["normalizer", "batcher"])
async def test_newest_rollouts_that_the_server_cannot_read_any_more_are_no_trimming(
    broker, make_lab, monkeypatch, stage
):
    monkeypatch.setattr(stream_marks, "BELIEVE_LOSS_S", 0.5)
    async with await broker.connect() as bus:
        lab = make_lab(bus)
        groups = [lab.group(number, env=ENV, samples=4) for number in range(8)]
        async with living(broker):
            await until_settled(bus, [await lab.store(group) for group in groups])
    await truncate(broker.server, subjects.ROLLOUTS, groups[5].id.encode())
    async with await broker.connect(stage) as bus:
        usage = await bus.usage(subjects.ROLLOUTS)
        assert (usage.last, usage.messages) == (8, 5)  # the server says no word of it: the three are as if trimmed
        with pytest.RaisesGroup(
            pytest.RaisesExc(
                HistoryLostError, match=r"read stream ROLLOUTS up to sequence 8, but that message is gone"
            ),
            flatten_subgroups=True,
            allow_unwrapped=True,
        ):
            with anyio.fail_after(60):
                await STAGES[stage](Service(bus, stage, RUN), CONFIG)


@pytest.mark.slow
async def test_annotations_alone_that_went_back_are_refused(broker):
    async with await broker.connect() as bus:
        world = World(bus)
        await world.reward(*[await world.rollout() for _ in range(2)])
        await broker.save()
        async with batcher(bus, make_config()):
            for n in range(1, 3):
                await read_until(bus, batches=n)
                await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=3)
    await broker.go_back(subjects.EVENTS)
    async with await broker.connect() as bus:
        with pytest.RaisesGroup(HistoryLostError, flatten_subgroups=True, allow_unwrapped=True):
            with anyio.fail_after(60):
                await run_batcher(Service(bus, "batcher", RUN), make_config())


async def test_a_ledger_alone_that_went_back_is_written_again_from_the_streams(broker):
    async with await broker.connect() as bus:
        world = World(bus)
        async with batcher(bus, make_config()):
            await world.reward(*[await world.rollout() for _ in range(2)])
            await read_until(bus, batches=1)
        await broker.save()
        async with batcher(bus, make_config()):
            await world.reward(*[await world.rollout() for _ in range(2)])
            before = await read_until(bus, batches=2)
    await broker.go_back(subjects.LEDGER)
    async with await broker.connect() as bus, batcher(bus, make_config()):
        after = await read_until(bus, batches=2)
    assert [entry.batch for entry in after] == [entry.batch for entry in before]
    assert fates(after) == fates(before)


@pytest.mark.slow
async def test_a_checkpoint_ahead_of_the_ledger_is_refused_and_the_way_back_leads_to_the_same_weights(
    broker, make_lab, tmp_path
):
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, tmp_path / "model")
    config = RunConfig(run=RUN, folder=str(tmp_path), model=str(tmp_path / "model"))
    groups = iter(range(1000))

    async def train(bus, steps, batches):
        lab = make_lab(bus)
        for _ in range(batches):
            await lab.extend_ledger([lab.group(next(groups), tokenizer_hash=policy.tokenizer_hash) for _ in range(2)])
        training = TrainingConfig(steps=steps, checkpoint_every=2)
        await run_trainer(Service(bus, "trainer", RUN), msgspec.structs.replace(config, training=training))

    async with await broker.connect() as bus:
        await train(bus, 2, 2)
        await broker.save()
        await train(bus, 6, 4)
    await broker.go_back()
    async with await broker.connect() as bus:
        with pytest.raises(LedgerError, match=r"write 'step-00000002' into .*/checkpoints/latest") as refused:
            await train(bus, 6, 0)
        assert "lost history" in str(refused.value)
        record = decode(PolicyRecord, (await bus.value(keys.POLICY)).value)
        assert record.policy_version.step == 2  # nothing of the lost steps was published
        (tmp_path / "checkpoints" / "latest").write_text("step-00000002\n")
        await train(bus, 6, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("integration.harness.RUN", RUN)
            calm = await trained_in_one_go(bus, tmp_path / "model", 6)
    checkpoint = load_checkpoint(latest_checkpoint(tmp_path / "checkpoints"), config.training.learner)
    assert checkpoint.state.step == 6
    assert weights_digest(policy_tensors(checkpoint.policy.model)) == calm
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(row)["train/step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
async def test_a_refused_process_ends_with_one_line_that_says_what_to_do(site: Site, make_lab):
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, site.folder / "model")
    config = f'run = "{RUN}"\nmodel = "{site.folder / "model"}"\n[training]\nsteps = 1\n'
    async with site.server() as bus:
        pass
    shutil.copytree(site.store, site.folder / "copy")
    async with site.server() as bus:
        lab = make_lab(bus)
        await lab.extend_ledger([lab.group(1, tokenizer_hash=policy.tokenizer_hash)])
        first = site.start(config, "trainer")
        assert await anyio.to_thread.run_sync(first.wait) == 0, site.said(first)
    shutil.rmtree(site.store)
    (site.folder / "copy").rename(site.store)
    async with site.server():
        second = site.start(config, "trainer")
        assert await anyio.to_thread.run_sync(second.wait) == EXIT_STARTUP, site.said(second)
    assert "Traceback" not in site.said(second)
    assert "holds 0 entries, of which 2 were read already" in site.said(second)
    assert "no checkpoint in" in site.said(second)
