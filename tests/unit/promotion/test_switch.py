"""A run that is switched while its services are killed at will: two revisions, each what a replay of its part gives."""

import random

import anyio
import msgspec
import pytest
from chaos import ledger_checks, refold
from chaos.history import read_history
from stages import run_batcher, run_normalizer, run_scorer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.offline.replay.stage import ReplayRequest, run_replay
from lachesis.pipeline.offline.reproduction.batches import verify_batches
from lachesis.pipeline.promotion.logic import request
from lachesis.pipeline.promotion.record import read_promotions, write_promotions
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.replay import RescoreEvent, Selection
from lachesis.schemas.rollout import Message
from lachesis.schemas.subjects import EVENTS, LEDGER, REPLAY
from lachesis.services.promotion import make_promotion

OLD = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="sums.py:Sums")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    normalization=NormalizationConfig(window=8, warmup_groups=2, warmup_samples=4),
    advantage=AdvantageConfig(estimator="reinforce++-baseline"),
    batching=BatchingConfig(batch_size=16, max_staleness=10_000),
)
NEW = msgspec.structs.replace(
    OLD,
    advantage=AdvantageConfig(estimator="reinforce++-baseline", std_floor=1000.0),
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match"), RaterConfig(rater="length")]),
    normalization=NormalizationConfig(window=6, warmup_groups=1, warmup_samples=4, mode="zscore"),
)
SERVICES = {
    "scorer": run_scorer,
    "normalizer": run_normalizer,
    "batcher": run_batcher,
}


class World:
    """The services of a run whose configuration never changes, each in lives that end when `kill` says so."""

    def __init__(self, lab) -> None:
        self.lab, self.bus = lab, lab.bus
        self.stored = self.last = 0  # how many rollouts, and the last one's sequence
        self.lives = {}

    async def produce(self, count: int, draw: random.Random) -> None:
        for n in range(self.stored + 1, self.stored + count + 1):
            said = [
                [
                    Message(role="user", content="q"),
                    Message(role="assistant", content=draw.choice(["yes", "no", "yes " * 9])),
                ]
                for _ in range(4)
            ]
            if n % 11 == 0:
                said = [talk[:1] for talk in said]  # it cannot be rated
            self.last = await self.lab.store(self.lab.group(n, samples=4, messages=said, task={"answer": "yes"}))
        self.stored += count

    async def live(self, name: str) -> None:
        """Run a service, again and again."""
        while True:
            async with self.lab.running(
                lambda service: SERVICES[name.partition("-")[0]](service, OLD), name.partition("-")[0]
            ) as service:
                self.lives[name] = ended = anyio.Event()
                await ended.wait()
                service.kill()

    def kill(self, name: str) -> None:
        self.lives[name].set()

    async def promote(self, revision: str, config: RunConfig, *, give_up: bool = False) -> None:
        """What `lachesis promote` does, less its checks and the wait."""
        known, expected = await read_promotions(self.bus, "r", "live")
        asked = make_promotion(config, revision, by="me", asked_ns=len(known) + 1, give_up=give_up)
        wanted = request("r", known, asked)
        if wanted is not None:
            try:
                await write_promotions(self.bus, wanted, "live", expected=expected)
            except FencedError:
                await self.promote(revision, config, give_up=give_up)

    async def entry(self) -> LedgerEntry | None:
        last = await self.bus.last(LEDGER, subjects.ledger("r", "main"))
        return decode(LedgerEntry, last.data) if last else None

    async def settled(self) -> bool:
        """Whether all have a reward or a letter, and all but the part of a batch an outcome."""
        known, _ = await read_promotions(self.bus, "r", "live")
        if any(one.first is None for one in known):
            return False
        letters = {letter.seq for letter in await self.lab.events("dead", DeadLetter)}
        if len(await self.rewards(1, self.last + 1)) + len(letters) < self.stored:
            return False
        entry = await self.entry()
        ended = ("batched", "zero_variance", "dead", "unscorable", "quarantined")
        return entry is not None and sum(entry.totals.get(kind, 0) for kind in ended) > self.stored - 4

    async def rewards(self, low: int, high: int) -> list:
        async with self.bus.read(EVENTS, [subjects.event("reward", "r", "live", "sums")], follow=False) as messages:
            found = [item for event in [decode(RewardEvent, m.data) async for m in messages] for item in event.groups]
        return sorted(
            (msgspec.structs.replace(i, stamps=[]) for i in found if low <= i.seq < high), key=lambda i: i.seq
        )

    async def replayed(self, name: str, config: RunConfig, low: int, high: int) -> list:
        selection = Selection(envs=["sums"], first_seq=low, last_seq=high - 1)
        request = ReplayRequest(revision=name, selection=selection)
        await run_replay(self.bus, config, request, draining=anyio.Event(), progress=lambda *_: None)
        subject = subjects.replay("rescore", "r", name, "sums")
        async with self.bus.read(REPLAY, [subject], follow=False) as messages:
            return [item for event in [decode(RescoreEvent, m.data) async for m in messages] for item in event.rewards]

    async def audit(self) -> None:
        history = await read_history(self.bus, "r")
        assert ledger_checks.promotions(history) == []
        assert ledger_checks.chain(history) == []
        assert ledger_checks.outcomes(history, OLD.batching) == []
        assert ledger_checks.manifests(history) == []
        assert ledger_checks.reasons(history, OLD.batching, OLD.advantage.std_floor) == []
        _, findings = await verify_batches(self.bus, OLD, "main", None, saved={}, progress=lambda *_: None)
        assert [finding.verdict for finding in findings] == ["ok"] * 3
        assert ledger_checks.writer_state(history) == []
        assert await refold.normalizer(self.bus, history, OLD, "sums") == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_each_side_of_a_switch_is_a_replay_of_it_however_services_are_killed(lab, seed, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.runtime.commitlog.SNAPSHOT_EVERY", 3)
    draw, world = random.Random(seed), World(lab)
    names = ["scorer-1", "scorer-2", "normalizer", "batcher"]
    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(world.live, name)
        await anyio.wait_all_tasks_blocked()
        for step in range(16):
            await world.produce(draw.randrange(2, 9), draw)
            if step == 5:
                tasks.start_soon(world.promote, "new", NEW)
            if step == 11:
                await lab.until(lambda: decided(world))
                tasks.start_soon(world.promote, "back", OLD)
            for _ in range(draw.randrange(4)):
                for _ in range(draw.randrange(30)):
                    await anyio.lowlevel.checkpoint()
                if seed:
                    world.kill(draw.choice(names))
        await lab.until(world.settled, 30)
        tasks.cancel_scope.cancel()
    known, _ = await read_promotions(lab.bus, "r", "live")
    assert [one.revision for one in known] == ["new", "back"]
    bounds = [1, *(one.first for one in known), world.last + 1]
    assert bounds == sorted(set(bounds)), bounds
    for i, config in enumerate((OLD, NEW, OLD)):
        low, high = bounds[i : i + 2]
        assert await world.rewards(low, high) == await world.replayed(f"part{i}", config, low, high)
    await world.audit()
    assert (await world.entry()).promoted.revision == "back"


async def decided(world) -> bool:
    known, _ = await read_promotions(world.bus, "r", "live")
    return bool(known) and known[-1].first is not None


async def test_scorers_wait_for_the_decision_and_then_go_on(lab):
    world = World(lab)
    await world.produce(4, random.Random(1))
    await world.promote("new", NEW)
    async with anyio.create_task_group() as tasks:
        await world.produce(5, random.Random(3))
        tasks.start_soon(world.live, "scorer")
        tasks.start_soon(world.live, "normalizer")
        with anyio.move_on_after(0.5):
            await lab.until(lambda: scored(lab))
        assert not await scored(lab), "judged without knowing by whom"
        tasks.start_soon(world.live, "batcher")
        await lab.until(world.settled)
        await world.produce(9, random.Random(2))
        await lab.until(world.settled)
        tasks.cancel_scope.cancel()
    (promoted,) = (await read_promotions(lab.bus, "r", "live"))[0]
    assert promoted.first == 6, "behind the list"
    ensembles = {event.promoted: sorted(event.raters) for event in await lab.events("score", ScoreEvent)}
    assert ensembles == {None: ["exact_match"], 6: ["exact_match", "length"]}
    await world.audit()


async def scored(lab) -> bool:
    return bool(await lab.events("score", ScoreEvent))


async def test_whitening_follows_the_revision(lab):
    world, draw = World(lab), random.Random(5)
    async with anyio.create_task_group() as tasks:
        for name in ("scorer", "normalizer", "batcher"):
            tasks.start_soon(world.live, name)
        await world.produce(20, draw)
        await lab.until(world.settled)
        await world.promote("new", NEW)
        await lab.until(lambda: decided(world))
        await world.produce(20, draw)
        await lab.until(world.settled)
        tasks.cancel_scope.cancel()
    await world.audit()
    largest = {False: 0.0, True: 0.0}
    for stored in (await read_history(lab.bus, "r")).entries:
        for ref in stored.entry.batch.groups if stored.entry.batch else ():
            values = [abs(value) for value in ref.advantages if value is not None]
            largest[bool(stored.entry.promoted)] = max(largest[bool(stored.entry.promoted)], *values)
    assert largest[False] > 0.5, "divided by their deviation"
    assert 0 < largest[True] < 0.01, "divided by the floor"


async def test_a_batcher_that_dies_before_it_tells_what_it_decided_tells_it_in_its_next_life(lab, monkeypatch):
    world, deaths = World(lab), []

    async def die(*args, **kwargs):
        deaths.append(await world.entry())
        monkeypatch.undo()
        world.kill("batcher")
        await anyio.sleep_forever()

    monkeypatch.setattr("lachesis.pipeline.promotion.record.write_promotions", die)
    draw = random.Random(3)
    async with anyio.create_task_group() as tasks:
        for name in ("scorer", "normalizer", "batcher"):
            tasks.start_soon(world.live, name)
        await world.produce(9, draw)
        await lab.until(world.settled)
        # by hand: `write` of the module is the batcher's now
        asked = make_promotion(NEW, "new", by="me", asked_ns=1)
        await write_promotions(lab.bus, request("r", [], asked), "live", expected=0)
        await world.produce(9, draw)
        await lab.until(world.settled)
        tasks.cancel_scope.cancel()
    (told,) = (await read_promotions(lab.bus, "r", "live"))[0]
    assert [entry.promoted.first for entry in deaths] == [told.first]
    await world.audit()


async def test_a_run_goes_on_without_raters_that_stay_away(lab, monkeypatch):
    score = EnvironmentScorer.score

    async def judged(self, group, seq):
        if self.versions.keys() == {"exact_match"}:
            raise InfrastructureError("rater exact_match: connection refused")
        return await score(self, group, seq)

    monkeypatch.setattr(EnvironmentScorer, "score", judged)
    world, draw = World(lab), random.Random(4)
    async with anyio.create_task_group() as tasks:
        for name in ("scorer", "normalizer", "batcher"):
            tasks.start_soon(world.live, name)
        await world.produce(9, draw)
        await world.promote("new", NEW)
        await lab.until(lambda: decided(world))
        await world.produce(9, draw)
        await lab.until(lambda: rewarded(world, 8))
        assert [letter.seq for letter in await lab.events("dead", DeadLetter)] == [13], "the others wait"
        await world.promote("new", NEW, give_up=True)
        await lab.until(lambda: buried(lab, 10))
        await lab.until(world.settled)
        tasks.cancel_scope.cancel()
    letters = {letter.seq: letter.reason for letter in await lab.events("dead", DeadLetter)}
    assert sorted(letters) == [*range(1, 10), 13]
    assert letters[1] == "DataError: given up, as revision new was promoted: rater exact_match: connection refused"
    assert await world.rewards(1, 99) == await world.replayed("after", NEW, 11, world.last + 1)
    await world.audit()


async def rewarded(world, count) -> bool:
    return len(await world.rewards(1, world.last + 1)) >= count


async def buried(lab, count) -> bool:
    return len(await lab.events("dead", DeadLetter)) >= count
