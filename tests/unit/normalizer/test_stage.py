"""The normalizer stage live: headers and scores in any interleaving, kills at any moment, bad scores, dead letters."""

import random

import anyio
import msgspec
import pytest
from stages import run_normalizer

from lachesis.pipeline.bus.api import StreamExtent
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import FencedError, StreamFullError
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer
from lachesis.pipeline.normalizer.stage import RewardWriter
from lachesis.pipeline.promotion.record import write_promotions
from lachesis.pipeline.runtime.stateful import run_stateful
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, GroupScore, RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.promotion import Promotions
from lachesis.services.promotion import make_promotion
from lachesis.services.stage_settings import normalizer_settings

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x")},
    normalization=NormalizationConfig(window=4, warmup_samples=4, warmup_groups=2),
)


def normalizer(service):
    return run_normalizer(service, CONFIG)


def a_score(lab, n, seq, *, value=None, **changes):
    """The scores of group n: two samples, different in every group."""
    rng = random.Random(n)
    values = [rng.uniform(-3, 3), rng.uniform(-3, 3)] if value is None else [value, 0.0]
    group = lab.group(n)
    fields = {"group": group.id, "seq": seq, "item": group.item, "policy_step": n, "scores": values, "ratings": {}}
    return GroupScore(**fields | {"lengths": [3, 3], "index": n} | changes)


async def publish_scores(lab, scores, msg_id, promoted=None):
    event = ScoreEvent(run="r", env="sums", revision="live", ensemble="e", raters={}, groups=scores, promoted=promoted)
    await lab.bus.publish(subjects.event("score", "r", "live", "sums"), encode(event), msg_id=msg_id)


async def publish_letter(lab, n, seq, stage="scorer"):
    letter = DeadLetter(
        leased=True, run="r", env="sums", revision="live", stage=stage, kind="data", stream=subjects.ROLLOUTS, seq=seq,
        group=None if n is None else f"{n:032x}", reason="bad", place="here", time_ns=1,
    )  # fmt: skip
    await lab.bus.publish(subjects.event("dead", "r", "live", "sums"), encode(letter), msg_id=f"l{seq}{stage}{n}")


async def rewards(lab):
    return [item for event in await lab.events("reward", RewardEvent) for item in event.groups]


def as_facts(items):
    """Rewards by group, without the stamps."""
    return {item.group: msgspec.structs.replace(item, stamps=[]) for item in items}


def rewarded(lab, count):
    async def condition():
        return len(await rewards(lab)) >= count

    return condition


async def test_every_scored_group_gets_one_reward(lab):
    async with lab.running(normalizer, "normalizer"):
        for n in range(30):
            await publish_scores(lab, [a_score(lab, n, await lab.store(lab.group(n)))], f"s{n}")
        await lab.until(rewarded(lab, 30))
    found = await rewards(lab)
    assert sorted(item.group for item in found) == [f"{n:032x}" for n in range(30)]
    assert {item.verdict for item in found} == {"trainable"}
    assert len({item.snapshot for item in found}) > 3
    first = as_facts(found)[f"{0:032x}"]
    assert first.rewards == first.scores  # nothing is known yet, so nothing is changed
    assert (first.policy_step, first.index, first.item) == (0, 0, "item-0")
    assert sum(first.advantages) == pytest.approx(0)


@pytest.mark.parametrize(("estimator", "whitened"), [("gdpo", True), ("reinforce++-baseline", True), ("grpo", False)])
async def test_what_the_batcher_needs_to_whiten_goes_with_the_reward(lab, estimator, whitened):
    config = msgspec.structs.replace(CONFIG, advantage=AdvantageConfig(estimator=estimator))
    async with lab.running(lambda service: run_normalizer(service, config), "normalizer"):
        for n, ratings in enumerate(({"a": [0.0, 1.0], "b": [1.0, 0.5]}, {})):
            score = a_score(lab, n, await lab.store(lab.group(n)), ratings=ratings, lengths=[4, 7])
            await publish_scores(lab, [score], f"s{n}")
        await lab.until(rewarded(lab, 2))
    rated, unrated = await rewards(lab)
    assert rated.lengths == ([4, 7] if whitened else [])
    assert rated.verdict == "trainable"
    if estimator == "gdpo":
        assert rated.advantages == pytest.approx([0.0, 0.0], abs=1e-15), "two opposite components of two samples"
        assert unrated.verdict == "quarantined"
        assert "one rater at least" in unrated.reason


async def test_an_environments_own_estimator_is_used_and_named(lab):
    own = EnvironmentConfig(kind="x", advantage=AdvantageConfig(estimator="rloo"))
    config = msgspec.structs.replace(CONFIG, environments={"sums": own})
    assert config.advantage_of("other").estimator == "centred"
    async with lab.running(lambda service: run_normalizer(service, config), "normalizer"):
        score = a_score(lab, 0, await lab.store(lab.group(0)), scores=[0.0, 1.0])
        await publish_scores(lab, [score], "s0")
        await lab.until(rewarded(lab, 1))
    assert {event.advantage for event in await lab.events("reward", RewardEvent)} == {"rloo"}
    assert [item.advantages for item in await rewards(lab)] == [[-1.0, 1.0]]


async def history(lab, seed, groups=40):
    """Store a history: groups, scores (early, late, repeated, several a message), dead letters. Return who is scored.

    Which outcome of a group counts is a function of EVENTS, so the same history is what a restart is compared on.
    """
    rng = random.Random(seed)
    scored = set()
    waiting = []
    stored = []
    for n in range(groups):
        seq = await lab.store(lab.group(n))
        stored.append((n, seq))
        waiting.append((n, seq))
        rng.shuffle(waiting)
        while waiting and rng.random() < 0.7:
            take = [waiting.pop() for _ in range(rng.randint(1, min(3, len(waiting))))]
            await settle(lab, rng, take, scored, f"a{n}.{len(waiting)}")
        if rng.random() < 0.3:  # scored again, by a redelivery that lost its acknowledgement
            n_again, seq_again = rng.choice(stored)
            await publish_scores(lab, [a_score(lab, n_again, seq_again)], f"again{n}")
            scored.add(n_again)
    for n, seq in waiting:
        await settle(lab, rng, [(n, seq)], scored, f"z{n}")
    return scored


async def settle(lab, rng, take, scored, msg_id):
    dead = {n for n, _ in take if rng.random() < 0.15}
    alive = [a_score(lab, n, seq) for n, seq in take if n not in dead]
    if alive:
        await publish_scores(lab, alive, msg_id)
    for n, seq in take:
        if n in dead:
            await publish_letter(lab, n, seq)


def settled(lab):
    """Whether the normalizer has read everything and rewarded all that it can: nothing new for a while."""
    before = [None, 0]

    async def condition():
        now = (await lab.bus.usage(subjects.EVENTS)).last
        before[1] = before[1] + 1 if before[0] == now else 0
        before[0] = now
        return before[1] > 5

    return condition


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_restarts_at_any_moment_change_nothing(lab, seed):
    """A run of the stage that is killed again and again gives the rewards of one that is not, bit for bit."""
    await history(lab, seed)
    async with lab.running(normalizer, "normalizer"):
        await lab.until(settled(lab))
    calm = await rewards(lab)
    assert len(calm) > 25

    wild_lab = type(lab)(type(lab.bus)())
    await history(wild_lab, seed)
    rng = random.Random(seed)
    for _ in range(40):
        async with wild_lab.running(normalizer, "normalizer") as service:
            for _ in range(rng.randint(0, 60)):
                await anyio.lowlevel.checkpoint()
            if rng.random() < 0.8:
                service.kill()
    async with wild_lab.running(normalizer, "normalizer"):
        await wild_lab.until(settled(wild_lab))
    wild = await rewards(wild_lab)
    assert sorted(item.group for item in wild) == sorted(item.group for item in calm)  # each exactly once
    assert as_facts(wild) == as_facts(calm)


@pytest.mark.parametrize("seed", range(6))
async def test_live_and_replayed_give_the_same(lab, seed):
    """The stage running while rollouts and scores come, killed now and then, and one that reads it all afterwards."""
    rng = random.Random(seed)
    async with anyio.create_task_group() as tasks:
        written = anyio.Event()

        async def write():
            await history(lab, seed)
            written.set()

        tasks.start_soon(write)
        while not written.is_set():
            async with lab.running(normalizer, "normalizer") as service:
                for _ in range(rng.randint(10, 400)):
                    await anyio.lowlevel.checkpoint()
                service.kill()
    async with lab.running(normalizer, "normalizer"):
        await lab.until(settled(lab))
    live = await rewards(lab)

    replay = type(lab)(type(lab.bus)())
    await history(replay, seed)
    async with replay.running(normalizer, "normalizer"):
        await replay.until(settled(replay))
    assert as_facts(live) == as_facts(await rewards(replay))
    assert len(live) == len(as_facts(live))


async def test_a_poisoned_score_is_a_dead_letter_and_its_window_closes(lab):
    async with lab.running(normalizer, "normalizer"):
        for n in range(20):
            value = 1e300 if n == 3 else None
            await publish_scores(lab, [a_score(lab, n, await lab.store(lab.group(n)), value=value)], f"s{n}")
        await lab.until(rewarded(lab, 19))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.stream, letter.seq, letter.group, letter.stage) == (
        subjects.ROLLOUTS, 4, f"{3:032x}", "normalizer",
    )  # fmt: skip
    assert f"{3:032x}" not in as_facts(await rewards(lab))


async def test_malformed_inputs_are_dead_letters_and_the_rest_goes_on(lab):
    for n in range(3):
        await publish_scores(lab, [a_score(lab, n, await lab.store(lab.group(n)))], f"s{n}")
    await lab.bus.publish(subjects.rollout("r", "sums"), b"", msg_id="h", headers={"Lachesis-Plan": "nonsense"})
    await lab.bus.publish(subjects.event("score", "r", "live", "sums"), b"\xc1", msg_id="x")
    await lab.bus.publish(subjects.event("dead", "r", "live", "sums"), b"\xc1", msg_id="y")
    async with lab.running(normalizer, "normalizer") as service:
        await lab.until(rewarded(lab, 3))
        await lab.until(lambda: _true(service.vitals.dead >= 3))
    async with lab.bus.read(subjects.EVENTS, [subjects.event("dead", "r", "live", "sums")], follow=False) as messages:
        stored = [message async for message in messages]
    letters = [msgspec.msgpack.decode(message.data, type=DeadLetter) for message in stored if message.data != b"\xc1"]
    assert sorted((letter.stream, letter.seq) for letter in letters) == [
        (subjects.EVENTS, 4), (subjects.EVENTS, 5), (subjects.ROLLOUTS, 4),
    ]  # fmt: skip


async def _true(value):
    return value


async def test_a_dead_copy_of_a_group_does_not_end_the_first(lab):
    """A message that only claims to be group 0 is dead; group 0 itself is scored."""
    first = await lab.store(lab.group(0))
    copy = await lab.store(lab.group(0, counter=50))
    await publish_letter(lab, 0, copy)
    await publish_scores(lab, [a_score(lab, 0, first)], "s")
    async with lab.running(normalizer, "normalizer"):
        await lab.until(rewarded(lab, 1))


@pytest.mark.parametrize("order", ["members first", "outcomes first"])
def test_what_counts_for_a_group_does_not_depend_on_what_is_read_first(order):
    """Group b lies at 3 with a copy at 5; outcomes name 5 without scores, 1 (another's place), 6 with scores, 3."""
    normalizer = EnvNormalizer("sums", NormalizationConfig(window=64))

    def members():
        for seq, group in enumerate("aabcb", 1):
            normalizer.member(seq, group * 32)

    def outcomes():
        normalizer.resolve("b" * 32, 5, None, source=1)
        normalizer.resolve("b" * 32, 1, {"score": [1.0]}, source=2)
        normalizer.resolve("b" * 32, 5, {"score": [2.0]}, source=3)
        normalizer.resolve("b" * 32, 3, {"score": [3.0]}, source=4)

    for step in (members, outcomes) if order == "members first" else (outcomes, members):
        step()
    (ready,) = normalizer.step().ready
    assert (ready.seq, ready.values, ready.source) == (3, {"score": (2.0,)}, 3)


async def test_a_score_that_names_no_member_does_not_lend_its_numbers(lab):
    """What is written of a group is from the message that scored it, whatever else named the group before."""
    seqs = [await lab.store(lab.group(n)) for n in range(2)]
    await publish_scores(lab, [a_score(lab, 1, 1, value=9.0, item="not mine")], "lie")  # group 1 is not at sequence 1
    await publish_scores(lab, [a_score(lab, n, seq) for n, seq in enumerate(seqs)], "s")
    async with lab.running(normalizer, "normalizer"):
        await lab.until(rewarded(lab, 2))
    for item in await rewards(lab):
        assert item.scores == a_score(lab, int(item.group, 16), item.seq).scores
        assert item.item != "not mine"


async def promote(lab, first, config=CONFIG):
    one = msgspec.structs.replace(make_promotion(config, "new", by="me", asked_ns=1), first=first)
    await write_promotions(lab.bus, Promotions(run="r", promotions=[one]), "live", expected=0)


async def test_a_rollout_that_died_before_its_revision_was_known_here_is_never_waited_for(lab):
    """It was folded by the own normalizer, which forgot it, and the letter lies below the cursor: a restart that finds
    the promotion must not read it again."""
    async with lab.running(normalizer, "normalizer") as service:
        await publish_scores(lab, [a_score(lab, n, await lab.store(lab.group(n))) for n in range(9)], "before")
        await promote(lab, 11)
        for n in range(9, 12):  # with them, a window is full
            await publish_letter(lab, n, await lab.store(lab.group(n)))
        await lab.until(committed_up_to(lab, 14))
        for n in range(20, 110):
            await lab.store(lab.group(n, env="other"))
        last = [(n, await lab.store(lab.group(n))) for n in (110, 111)]
        service.kill()
    async with lab.running(normalizer, "normalizer"):
        await publish_scores(lab, [a_score(lab, n, seq) for n, seq in last], "after", promoted=11)
        await lab.until(rewarded(lab, 11))
        # the dead count as the first of the new revision, as in a replay of it
        await lab.until(committed_up_to(lab, last[0][1] + 1))
        assert await committed_up_to(lab, 101)()


async def test_a_score_by_the_wrong_revision_ends_its_rollout_with_a_letter(lab):
    await promote(lab, 4)
    seqs = [await lab.store(lab.group(n)) for n in range(10)]
    async with lab.running(normalizer, "normalizer"):
        await publish_scores(lab, [a_score(lab, n, seqs[n]) for n in (0, 1, 2)], "old")  # 2 is the new one's
        await publish_scores(lab, [a_score(lab, n, seqs[n]) for n in range(3, 10)], "new", promoted=4)
        await lab.until(rewarded(lab, 9))
        await lab.until(committed_up_to(lab, 9))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.stream, letter.seq, letter.group) == (subjects.ROLLOUTS, 4, f"{2:032x}")
    assert "scored by the run's own revision, where the revision promoted at 4 counts" in letter.reason


async def test_scores_of_a_promotion_that_a_lagging_server_does_not_know_wait_for_it(lab, monkeypatch):
    await promote(lab, 2)
    seqs = [await lab.store(lab.group(n)) for n in range(9)]

    async def extent(*_):
        return StreamExtent(0, 0)

    monkeypatch.setattr(lab.bus, "extent", extent)
    async with lab.running(normalizer, "normalizer") as service:
        await publish_scores(lab, [a_score(lab, n, seq) for n, seq in enumerate(seqs)], "new", promoted=2)
        await lab.until(lambda: _true(service.vitals.retried >= 2))
        assert "lags behind" in service.vitals.status_text
        monkeypatch.undo()
        await lab.until(rewarded(lab, 9))
    assert not await lab.events("dead", DeadLetter)


@pytest.mark.parametrize("first", [3, 1 << 40])
async def test_scores_of_a_promotion_that_there_is_not_are_a_dead_letter(lab, monkeypatch, first):
    monkeypatch.setattr("lachesis.pipeline.normalizer.stage._MAX_POLLS", 1)
    monkeypatch.setattr("lachesis.pipeline.normalizer.stage._POLL_S", 0.0)
    await promote(lab, 2)
    seqs = [await lab.store(lab.group(n)) for n in range(9)]
    scores = [a_score(lab, n, seq) for n, seq in enumerate(seqs)]
    async with lab.running(normalizer, "normalizer"):
        await publish_scores(lab, scores, "forged", promoted=first)
        await publish_scores(lab, scores, "new", promoted=2)
        await lab.until(rewarded(lab, 9))
    (letter,) = await lab.events("dead", DeadLetter)
    assert f"scores are of a promotion from sequence {first} on, and there is none" in letter.reason


def committed_up_to(lab, seq):
    async def condition():
        events = await lab.events("reward", RewardEvent)
        return bool(events) and events[-1].commit.cursors[subjects.ROLLOUTS] >= seq

    return condition


async def test_a_full_stream_is_waited_for(lab, monkeypatch):
    full = True
    commit = lab.bus.commit

    async def bounded(*args, **kwargs):
        if full:
            raise StreamFullError("EVENTS is at its budget")
        return await commit(*args, **kwargs)

    monkeypatch.setattr(lab.bus, "commit", bounded)
    await publish_scores(lab, [a_score(lab, 0, await lab.store(lab.group(0)))], "s")
    async with lab.running(normalizer, "normalizer") as service:
        await lab.until(lambda: _true(service.vitals.retried >= 2))
        assert service.vitals.state == "backpressure"
        full = False
        await lab.until(rewarded(lab, 1))
        await lab.until(lambda: _true(service.vitals.state == "ok"))
    full = True
    async with lab.running(normalizer, "normalizer") as service:  # and a drain while it waits is no crash
        await publish_scores(lab, [a_score(lab, 1, await lab.store(lab.group(1)))], "t")
        await lab.until(lambda: _true(service.vitals.retried >= 1))
    full = False
    async with lab.running(normalizer, "normalizer"):
        await lab.until(rewarded(lab, 2))


async def test_of_two_normalizers_the_older_is_fenced(lab):
    fenced = anyio.Event()

    async def older(service):
        with pytest.raises(BaseExceptionGroup) as caught:
            await run_normalizer(service, CONFIG)
        assert caught.value.split(FencedError)[1] is None
        fenced.set()

    hold = anyio.Event()

    async with lab.running(older, "normalizer") as first:
        await publish_scores(lab, [a_score(lab, 0, await lab.store(lab.group(0)))], "s0")
        await lab.until(rewarded(lab, 1))
        commit = first.bus.commit

        async def late(*args, **kwargs):
            await hold.wait()
            return await commit(*args, **kwargs)

        first.bus.commit = late
        async with lab.running(normalizer, "normalizer"):
            await publish_scores(lab, [a_score(lab, 1, await lab.store(lab.group(1)))], "s1")
            await lab.until(rewarded(lab, 2))
            hold.set()
            with anyio.fail_after(10):
                await fenced.wait()
    terms = [event.commit.term for event in await lab.events("reward", RewardEvent)]
    assert len(terms) == len(set(terms)) == 2
    assert terms[0] == first.instance


async def events_cursor(lab):
    """The first sequence of EVENTS that a restart reads again, by the newest commit."""
    return (await lab.events("reward", RewardEvent))[-1].commit.cursors[subjects.EVENTS]


async def test_a_score_of_a_rollout_that_is_not_stored_does_not_hold_up_events_for_ever(lab):
    batching = msgspec.structs.replace(CONFIG.batching, lost_deadline_s=0.05)
    config = msgspec.structs.replace(CONFIG, batching=batching)
    async with lab.running(lambda service: run_normalizer(service, config), "normalizer"):
        await publish_scores(lab, [a_score(lab, 99, 1 << 40)], "nowhere")
        for n in range(60):
            await publish_scores(lab, [a_score(lab, n, await lab.store(lab.group(n)))], f"s{n}")
            await lab.until(rewarded(lab, n + 1))
            if await events_cursor(lab) > 60:
                break
        assert await events_cursor(lab) > 1, "nothing after that score can ever be trimmed"
    assert f"{99:032x}" not in as_facts(await rewards(lab))


async def test_scores_far_ahead_of_their_rollouts_join_and_those_of_nothing_are_bounded(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.normalizer.stage._MAX_AHEAD", 8)
    stored = [await lab.store(lab.group(n)) for n in range(30)]
    await publish_scores(lab, [a_score(lab, n, seq) for n, seq in enumerate(stored)], "all")
    nothing = [a_score(lab, 100 + n, (1 << 40) + n) for n in range(50)]
    await publish_scores(lab, nothing, "nowhere")
    writers = []

    def followed(service):
        writers.append(RewardWriter(service, normalizer_settings(CONFIG), "sums"))
        return run_stateful(writers)

    async with lab.running(followed, "normalizer"):
        await lab.until(rewarded(lab, 30))
        await publish_scores(lab, [a_score(lab, 30, await lab.store(lab.group(30)))], "last")
        await lab.until(rewarded(lab, 31))
        assert writers[0].normalizer.ahead <= 8
        assert writers[0].normalizer.metrics()["reward_norm/sums/unknown"] == 50
        assert writers[0].normalizer.metrics()["reward_norm/sums/duplicates"] == 0
    assert sorted(as_facts(await rewards(lab))) == [f"{n:032x}" for n in range(31)]
