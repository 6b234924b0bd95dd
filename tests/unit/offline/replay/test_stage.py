"""Replays over a bus in memory: equal to the live run, to themselves however often killed, and refused where wrong."""

from contextlib import asynccontextmanager

import anyio
import msgspec
import numpy as np
import pytest
from stages import run_normalizer, run_scorer

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import FencedError, NotFoundError
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.offline.replay.logic.rollout_filter import groups_digest
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.stage import ReplayRequest, run_replay
from lachesis.pipeline.retention.holds import holding, read_record, update_record
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.replay import RescoreEvent, Selection
from lachesis.schemas.rollout import Message

SUMS = EnvironmentConfig(kind="sums.py:Sums")
RATERS = [RaterConfig(rater="exact_match"), RaterConfig(rater="length")]
CONFIG = RunConfig(
    run="r",
    environments={"sums": SUMS},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
    normalization=NormalizationConfig(window=8, warmup_groups=2, warmup_samples=4),
)
ALL = Selection(envs=["sums"])


async def stored(lab, count: int, env: str = "sums") -> list[int]:
    """Store groups of four samples that are right or wrong at random; among them a copy and one without an answer."""
    draw = np.random.default_rng(7)
    seqs = []
    for n in range(1, count + 1):
        said = [
            [
                Message(role="user", content="q"),
                Message(role="assistant", content="yes" if draw.random() < 0.5 else "no"),
            ]
            for _ in range(4)
        ]
        if n == 5:
            said = [talk[:1] for talk in said]  # no assistant message: it cannot be rated
        answer = "yes" if n % 3 else "no"  # so that some groups can be rated for a task with another answer
        group = lab.group(n, env=env, samples=4, messages=said, task={"answer": answer})
        seqs.append(await lab.store(group))
        if n == 9:
            await lab.store(msgspec.structs.replace(group, counter=1000))
    return seqs


async def replay(
    lab, revision="again", selection=ALL, *, config=CONFIG, bus=None, groups=None, pace=None, stop_at=None
):
    draining = anyio.Event()

    def progress(done: int, total: int) -> None:
        if stop_at is not None and done >= stop_at:
            draining.set()

    request = ReplayRequest(revision=revision, selection=selection, groups=groups, pace=pace or ReplayPace())
    return await run_replay(bus or lab.bus, config, request, draining=draining, progress=progress)


async def written(lab, revision="again", env="sums") -> list[RescoreEvent]:
    subject = subjects.replay("rescore", "r", revision, env)
    async with lab.bus.read(subjects.REPLAY, [subject], follow=False) as messages:
        return [decode(RescoreEvent, message.data) async for message in messages]


def facts(items):
    return [msgspec.structs.replace(item, stamps=[]) for item in items]


async def test_all_history_under_the_live_settings_gives_the_live_rewards_to_the_bit(lab):
    await stored(lab, 60)

    async def settled() -> bool:
        return sum(len(event.groups) for event in await lab.events("reward", RewardEvent)) == 59

    async with (
        lab.running(lambda service: run_scorer(service, CONFIG), "scorer"),
        lab.running(lambda service: run_normalizer(service, CONFIG), "normalizer"),
    ):
        await lab.until(settled)
    before = await lab.bus.usage(subjects.EVENTS)
    result = await replay(lab)
    assert (result.groups, result.total, result.unscored, result.finished) == (61, 61, 1, True)
    events = await written(lab)
    live_rewards = [item for event in await lab.events("reward", RewardEvent) for item in event.groups]
    live_scores = [item for event in await lab.events("score", ScoreEvent) for item in event.groups]
    rewards = [item for event in events for item in event.rewards]
    assert facts(rewards) == facts(sorted(live_rewards, key=lambda item: item.seq))
    assert any(reward.rewards != reward.scores for reward in rewards), "nothing was ever normalized"
    scores = [item for event in events for item in event.scores]
    assert all(score.signals for score in live_scores)
    assert any(score.controls for score in live_scores)
    assert any(score.fixed for score in live_scores)
    for_health_alone = {"signals": None, "controls": {}, "fixed": None}
    judged = [msgspec.structs.replace(score, **for_health_alone) for score in live_scores]
    assert facts(scores) == facts(sorted(judged, key=lambda item: item.seq))
    assert [item.seq for event in events for item in event.unscored] == [5]
    assert await lab.bus.usage(subjects.EVENTS) == before


@pytest.mark.parametrize("kills", range(4))
async def test_it_gives_the_same_bits_however_often_it_is_killed_or_paused(lab, kills, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 30)
    monkeypatch.setattr("lachesis.pipeline.runtime.commitlog.SNAPSHOT_EVERY", 3)
    await stored(lab, 80)
    whole = await replay(lab, "whole")
    assert len(await written(lab, "whole")) > 8
    draw = np.random.default_rng(kills)
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 11 + 7 * kills)
    for _ in range(3):
        with pytest.raises(lab.Killed):
            await replay(lab, bus=_Dying(lab, int(draw.integers(1, 4))))
        await replay(lab, stop_at=0)
    broken = await replay(lab)
    assert broken.finished
    assert broken.digest == whole.digest
    one, other = await written(lab, "whole"), await written(lab)
    assert len(other) != len(one)
    for column in ("scores", "rewards"):
        assert facts(item for event in one for item in getattr(event, column)) == facts(
            item for event in other for item in getattr(event, column)
        )
    again = await replay(lab)
    assert (again.digest, again.groups) == (whole.digest, whole.groups)
    assert len(await written(lab)) == len(other)


class _Dying:
    """A process's view of the bus that is killed with its commit number `left`, which may or may not be stored."""

    def __init__(self, lab, left: int) -> None:
        self._bus, self._left, self._killed = lab.bus, left, lab.Killed

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def commit(self, *args, **kwargs):
        self._left -= 1
        if self._left % 2 or self._left > 0:
            stored = await self._bus.commit(*args, **kwargs)
        if self._left <= 0:
            raise self._killed
        return stored


async def test_a_selection_holds_what_it_says_and_windows_hold_the_selected_alone(lab):
    seqs = await stored(lab, 40)
    picked = Selection(envs=["sums"], first_seq=seqs[9], last_seq=seqs[19])
    await replay(lab, "part", picked)
    assert [item.seq for event in await written(lab, "part") for item in event.scores] == seqs[9:20]
    ids = frozenset(f"{n:032x}" for n in (3, 30))
    listed = Selection(envs=["sums"], groups=groups_digest(ids))
    await replay(lab, "listed", listed, groups=ids)
    assert [item.group for event in await written(lab, "listed") for item in event.scores] == sorted(ids)
    with pytest.raises(NotFoundError, match="1 of the 2 groups listed are not selected"):
        await replay(lab, "other", listed, groups=frozenset({f"{3:032x}", "f" * 32}))
    assert await lab.bus.last(subjects.REPLAY, subjects.revision("r", "other")) is None


async def test_what_came_after_the_first_start_is_not_in_the_revision(lab):
    await stored(lab, 10)
    first = await replay(lab, stop_at=0)
    assert not first.finished
    await lab.store(lab.group(99, samples=4, task={"answer": "yes"}))
    done = await replay(lab)
    assert (done.groups, done.finished) == (11, True)


async def test_a_revision_never_changes(lab):
    await stored(lab, 10)
    await replay(lab)
    other = msgspec.structs.replace(CONFIG, scoring=ScoringConfig(raters=RATERS))
    with pytest.raises(ConfigError, match=r"exists and is another: judges\.sums\.ensemble was"):
        await replay(lab, config=other)
    with pytest.raises(ConfigError, match=r"selection\.min_step was None, is 1"):
        await replay(lab, selection=msgspec.structs.replace(ALL, min_step=1))


async def test_what_cannot_be_replayed_is_refused_with_the_reason(lab):
    with pytest.raises(NotFoundError, match="nothing is selected in run r, sums, sequences 1 to 1"):
        await replay(lab)
    await stored(lab, 10)
    with pytest.raises(NotFoundError, match="nothing is selected"):
        await replay(lab, selection=msgspec.structs.replace(ALL, min_step=5))
    with pytest.raises(ConfigError, match="the live run's"):
        await replay(lab, "live")
    with pytest.raises(ConfigError, match="no environment 'words'; there are sums"):
        await replay(lab, selection=Selection(envs=["words"]))


async def test_trimmed_history_is_named(lab):
    await stored(lab, 10)
    await update_record(lab.bus, "r", lambda old: old.replace(trimmed={subjects.ROLLOUTS: 4}))
    with pytest.raises(NotFoundError, match="kept from sequence 4 on, not from 2"):
        await replay(lab, selection=Selection(envs=["sums"], first_seq=2))
    result = await replay(lab)
    assert result.groups == 11 - 3


async def test_it_holds_history_back_while_it_runs_and_not_longer(lab):
    await stored(lab, 10)
    seen = []

    class Watching:
        def __getattr__(self, name):
            return getattr(lab.bus, name)

        async def commit(self, *args, **kwargs):
            seen.append([hold.needs for hold in (await read_record(lab.bus, "r")).holds.values()])
            return await lab.bus.commit(*args, **kwargs)

    await replay(lab, bus=Watching())
    assert seen[0] == [{subjects.ROLLOUTS: 1}]
    assert (await read_record(lab.bus, "r")).holds == {}


async def test_of_two_at_once_one_is_fenced(lab):
    await stored(lab, 10)

    class Late:
        """Somebody else commits just before this one does."""

        def __getattr__(self, name):
            return getattr(lab.bus, name)

        async def commit(self, subject, *args, **kwargs):
            if ".rescore." in subject:
                await replay(lab)
            return await lab.bus.commit(subject, *args, **kwargs)

    with pytest.raises(FencedError):
        await replay(lab, bus=Late())
    assert len([item for event in await written(lab) for item in event.scores]) == 10


async def test_nothing_is_committed_behind_a_commit_that_failed(lab, monkeypatch):
    """What it was to store is lost to the process: a later commit would leave it out."""
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 5)
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_COMMIT_S", 0.01)
    await stored(lab, 40)
    tried = []

    class Slow(EnvironmentScorer):
        async def score(self, group, seq):
            await anyio.sleep(0.02 * (seq % 8))  # so that some are folded while others are committed
            return await super().score(group, seq)

    monkeypatch.setattr("lachesis.pipeline.offline.replay.scoring.EnvironmentScorer", Slow)

    class Failing:
        def __getattr__(self, name):
            return getattr(lab.bus, name)

        async def commit(self, subject, *args, **kwargs):
            if ".rescore." not in subject:
                return await lab.bus.commit(subject, *args, **kwargs)
            tried.append(subject)
            await anyio.sleep(0.5)
            raise lab.Killed

    with pytest.raises(lab.Killed):
        await replay(lab, bus=Failing(), pace=ReplayPace(max_inflight=8))
    assert len(tried) == 1


async def test_pace_bounds_rate_and_groups_in_flight(lab):
    await stored(lab, 12)
    began = anyio.current_time()
    await replay(lab, pace=ReplayPace(max_rate=40.0, max_inflight=2))
    assert anyio.current_time() - began >= 12 / 40


async def test_how_long_each_rating_takes_changes_nothing(lab, monkeypatch):
    await stored(lab, 40)
    calm = await replay(lab, "calm", pace=ReplayPace(max_inflight=1))
    draw = np.random.default_rng(1)

    class Slow(EnvironmentScorer):
        async def score(self, group, seq):
            await anyio.sleep(float(draw.random()) * 0.02)
            return await super().score(group, seq)

    monkeypatch.setattr("lachesis.pipeline.offline.replay.scoring.EnvironmentScorer", Slow)
    hasty = await replay(lab, "hasty", pace=ReplayPace(max_inflight=16))
    assert hasty.digest == calm.digest


@pytest.mark.parametrize("follow", [False, True])
async def test_what_was_held_up_by_one_rating_goes_into_as_many_commits_as_it_takes(lab, monkeypatch, follow):
    """Of two environments: what waits to be folded is passed over by neither."""
    await stored(lab, 30)
    for n in range(100, 130):
        await lab.store(lab.group(n, env="sums" if n % 3 else "words", samples=4, task={"answer": "yes"}))
    config = msgspec.structs.replace(CONFIG, environments={"sums": SUMS, "words": SUMS})
    selection = Selection(envs=["sums", "words"])
    calm = await replay(lab, "calm", selection, config=config, pace=ReplayPace(max_inflight=1))
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 30)
    others = anyio.Event()
    judged = 0

    class Held(EnvironmentScorer):
        is_asynchronous = True

        async def score(self, group, seq):
            nonlocal judged
            judged += 1
            if judged == 25:
                others.set()
            if seq == 1:
                await others.wait()
            return await super().score(group, seq)

    monkeypatch.setattr("lachesis.pipeline.offline.replay.scoring.EnvironmentScorer", Held)
    if follow:
        shadow = Selection(envs=selection.envs, first_seq=1, follow=True)
        hasty = await replay(lab, "hasty", shadow, config=config, stop_at=61)
    else:
        hasty = await replay(lab, "hasty", selection, config=config)
    assert (hasty.groups, hasty.digest) == (61, calm.digest)
    events = [event for env in selection.envs for event in await written(lab, "hasty", env)]
    assert 25 < max(sum(1 + len(score.scores) for score in event.scores) for event in events) < 30 + 5


async def test_what_has_been_read_is_let_go_while_it_runs(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 30)
    await stored(lab, 30)
    needed = []

    @asynccontextmanager
    async def watched(*args, **kwargs):
        async with holding(*args, **kwargs) as held:
            yield held
            needed.append(dict(held.needs))

    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage.holding", watched)
    await replay(lab)
    last = (await lab.bus.usage(subjects.ROLLOUTS)).last
    assert needed == [{subjects.ROLLOUTS: last + 1}]


async def test_environments_are_replayed_each_for_itself(lab):
    both = msgspec.structs.replace(CONFIG, environments={"sums": SUMS, "words": SUMS})
    for n in range(1, 31):
        for k, env in enumerate(("sums", "words")):
            talk = [
                Message(role="user", content="q"),
                Message(role="assistant", content=["yes", "no"][(n * 7 + k) % 2]),
            ]
            said = [talk, [talk[0], Message(role="assistant", content="yes")]]
            await lab.store(lab.group(2 * n + k, env=env, messages=said, task={"answer": "yes"}))
    await replay(lab, "both", Selection(envs=["sums", "words"]), config=both, stop_at=10)
    result = await replay(lab, "both", Selection(envs=["sums", "words"]), config=both)
    assert (result.groups, result.finished) == (60, True)
    for env in ("sums", "words"):
        await replay(lab, env, Selection(envs=[env]), config=both)
        together, alone = await written(lab, "both", env), await written(lab, env, env)
        assert together[-1].digest == alone[-1].digest
        assert len([item for event in together for item in event.scores]) == 30


async def test_foreign_messages_on_its_subjects_are_passed_over(lab):
    await stored(lab, 20)
    for n, subject in enumerate((subjects.revision("r", "again"), subjects.replay("rescore", "r", "again", "sums"))):
        await lab.bus.publish(subject, b"garbage", msg_id=f"garbage-{n}")
    result = await replay(lab)
    assert result.finished
    assert (await replay(lab)).digest == result.digest == (await replay(lab, "other")).digest


async def test_raters_are_loaded_once(lab, monkeypatch):
    """They may be models."""
    loaded = []
    load = EnvironmentScorer.__init__

    def count(self, *arguments):
        loaded.append(self)
        load(self, *arguments)

    monkeypatch.setattr(EnvironmentScorer, "__init__", count)
    await stored(lab, 2)
    assert (await replay(lab)).finished
    assert len(loaded) == 1
