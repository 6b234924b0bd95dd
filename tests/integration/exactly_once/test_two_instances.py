"""Two processes of a single-writer service, started at the same moment, so that neither is refused by name: one is
fenced and says so, and the record is whole."""

import subprocess
from pathlib import Path

import anyio
import pytest
from integration.batcher.test_batcher import ENV, RUN, World, fates

from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.annotations import CurriculumEvent, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.ledger import TrainReport
from lachesis.services.process.service_process import EXIT_FENCED

from .conftest import SUMS

CONFIG = f"""
run = "{RUN}"
model = "MODEL"

[environments.{ENV}]
kind = "{SUMS}:Sums"
samples = 4

[batching]
batch_size = 8
max_staleness = 50

[normalization]
window = 4

[training]
checkpoint_every = 1
"""

UNASKED = Path(__file__).parents[1] / "unasked.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def events(bus, kind, model):
    async with bus.read(subjects.EVENTS, [subjects.event(kind, RUN, "live", ENV)], follow=False) as messages:
        return [decode(model, message.data) async for message in messages]


async def one_of_two(site, bus, service, feed, *, config=CONFIG):
    """Start two, feed them until one has ended, and return the survivor and the other."""
    first = site.start(config, service)
    await site.ready(bus, RUN, first)
    await feed()
    second = site.start(config, service, "--replica", "2", program=(str(UNASKED),))
    found: list[subprocess.Popen[bytes]] = []

    async def keep_feeding():
        while not found:  # never cut off: what is fed is stored whole, and noted
            await anyio.sleep(0.2)
            await feed()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_feeding)
        found += await site.ended(first, second)
    (ended,) = found
    assert ended.returncode == EXIT_FENCED, site.said(ended)
    assert "Traceback" not in site.said(ended)
    return (second if ended is first else first), ended


async def until(bus, stream, condition):
    with anyio.fail_after(120):
        async with bus.read(stream, []) as messages:
            while not await condition():
                await anext(aiter(messages))


async def test_two_normalizers(site):
    async with site.server() as bus:
        world, seqs = World(bus), []

        async def feed():
            for _ in range(4):
                seq, group = await world.rollout()
                item = GroupScore(
                    group=group.id,
                    seq=seq,
                    item="i",
                    policy_step=0,
                    scores=[0.0, 1.0, 0.5, float(len(seqs) % 3)],
                    ratings={},
                    lengths=[1] * 4,
                )
                event = ScoreEvent(run=RUN, env=ENV, revision="live", ensemble="e", raters={}, groups=[item])
                await bus.publish(subjects.event("score", RUN, "live", ENV), encode(event), msg_id=f"s{seq}")
                seqs.append(seq)

        survivor, ended = await one_of_two(site, bus, "normalizer", feed)

        async def all_rewarded():
            return sum(len(event.groups) for event in await events(bus, "reward", RewardEvent)) >= len(seqs)

        await until(bus, subjects.EVENTS, all_rewarded)
        found = await events(bus, "reward", RewardEvent)
        assert survivor.poll() is None, site.said(survivor)  # it ends with its server
    assert "another writer has taken over" in site.said(ended)
    assert sorted(item.seq for event in found for item in event.groups) == seqs
    assert [event.commit.index for event in found] == list(range(len(found)))
    assert len({event.commit.term for event in found}) <= 2


async def test_two_curricula(site):
    async with site.server() as bus:
        world, groups = World(bus), []

        async def feed():
            groups.append(await world.rollout())
            await world.reward(groups[-1])

        survivor, ended = await one_of_two(site, bus, "curriculum", feed)

        async def all_seen():
            found = await events(bus, "curriculum", CurriculumEvent)
            last = await bus.last(subjects.EVENTS, subjects.event("reward", RUN, "live", ENV))
            return found[-1].commit.cursors[subjects.EVENTS] > last.seq

        await until(bus, subjects.EVENTS, all_seen)
        found = await events(bus, "curriculum", CurriculumEvent)
        assert survivor.poll() is None, site.said(survivor)  # it ends with its server
    assert "another writer has taken over" in site.said(ended)
    assert [event.commit.index for event in found] == list(range(len(found)))
    cursors = [event.commit.cursors[subjects.EVENTS] for event in found]
    assert cursors == sorted(set(cursors))


async def test_two_batchers(site):
    async with site.server() as bus:
        world, seqs = World(bus), []

        async def feed():
            groups = [await world.rollout() for _ in range(2)]
            seqs.extend(seq for seq, _ in groups)
            await world.reward(*groups)

        async def ledger():
            return [entry async for entry in follow_ledger(bus, RUN, "main", LedgerPosition(), follow=False)]

        survivor, ended = await one_of_two(site, bus, "batcher", feed)

        async def all_settled():
            return len(fates(await ledger())) == len(seqs)

        await until(bus, subjects.LEDGER, all_settled)
        entries = await ledger()
        assert survivor.poll() is None, site.said(survivor)  # it ends with its server
    assert "another writer has taken over" in site.said(ended)
    assert fates(entries) == dict.fromkeys(seqs, "batched")
    assert [entry.batch.number for entry in entries if entry.batch] == list(range(len(seqs) // 2))


async def test_two_governors(site):
    async with site.server() as bus:

        async def feed():
            pass

        survivor, ended = await one_of_two(site, bus, "governor", feed)
        term = await bus.last(subjects.LEDGER, subjects.state(RUN, "governor", "live", "0"))
    assert ended is site.processes[0]  # the later one takes over
    assert f"has taken over run {RUN}" in site.said(ended)
    assert decode(StateSnapshot, term.data).state.decode().startswith(f"{survivor.pid}-")


async def test_two_trainers(site, make_lab):
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    save_policy(policy, site.folder / "model")
    async with site.server() as bus:
        lab, fed = make_lab(bus), []

        async def feed():
            if len(fed) < 10:
                fed.append(lab.group(len(fed), tokenizer_hash=policy.tokenizer_hash))
                await lab.extend_ledger([fed[-1]])

        config = CONFIG.replace("MODEL", str(site.folder / "model"))
        survivor, ended = await one_of_two(site, bus, "trainer", feed, config=config)
        subject = subjects.state(RUN, "trainer", "live", "main")

        async def all_trained():
            stored = await bus.last(subjects.LEDGER, subject)
            return stored is not None and decode(TrainReport, stored.data).step == len(fed)

        await until(bus, subjects.LEDGER, all_trained)
        async with bus.read(subjects.LEDGER, [subject], follow=False) as messages:
            reports = [decode(TrainReport, message.data) async for message in messages]
    assert ended is site.processes[1]  # the first holds the checkpoints
    assert f"another trainer (pid {survivor.pid}) writes" in site.said(ended)
    assert [report.step for report in reports] == list(range(1, len(fed) + 1))
    assert len({report.term for report in reports}) == 1
