"""Shadows over a bus in memory: the bits of a replay of the same range, however often killed; out of the run's way."""

import anyio
import msgspec
import numpy as np
import pytest
from stages import run_normalizer, run_scorer
from unit.offline.replay.test_stage import CONFIG, SUMS, _Dying, facts, replay, stored, written

from lachesis.pipeline.errors import NotFoundError, leaves
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.revisions import following
from lachesis.pipeline.offline.replay.stage import ReplayRequest
from lachesis.pipeline.retention.holds import read_record, update_record
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.replay import Selection
from lachesis.schemas.subjects import REPLAY, ROLLOUTS
from lachesis.services.shadow import run_shadow

FOLLOW = Selection(envs=["sums"], first_seq=1, follow=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_COMMIT_S", 0.02)
    monkeypatch.setattr("lachesis.services.shadow._PERIOD_S", 0.02)


async def shadow(lab, until, *, revision="again", selection=FOLLOW, config=CONFIG, bus=None, pace=None, beside=None):
    """Follow the run until `until` holds, then stop it as `lachesis shadow stop` does."""
    service = Service(bus or lab.bus, "shadow", "r", revision)
    results = []

    async def follow() -> None:
        request = ReplayRequest(revision=revision, selection=selection, pace=pace or ReplayPace())
        results.append(await run_shadow(service, config, request))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            if beside is not None:
                await beside()
            await lab.until(lambda: until(service))
            await lab.bus.request(subjects.shadow("r", revision), b"", timeout_s=5)
    except BaseExceptionGroup as group:
        [error] = leaves(group)
        raise error from None
    return results[0], service


def at(lab, seq, revision="again"):
    async def reached(_) -> bool:
        return [position for one, position in await following(lab.bus, "r") if one.revision == revision] == [seq + 1]

    return reached


async def test_it_follows_and_gives_the_bits_of_a_replay_of_the_same_range(lab):
    await stored(lab, 30)
    last = (await lab.bus.usage(ROLLOUTS)).last

    async def more():
        await lab.until(lambda: at(lab, last)(None))
        for n in range(100, 140):
            await lab.store(lab.group(n, samples=4, task={"answer": "yes"}))

    result, _ = await shadow(lab, at(lab, last + 40), beside=more)
    assert (result.groups, result.finished) == (71, False)
    whole = await replay(lab, "whole")
    assert result.digest == whole.digest
    for column in ("scores", "rewards"):
        assert facts(item for event in await written(lab) for item in getattr(event, column)) == facts(
            item for event in await written(lab, "whole") for item in getattr(event, column)
        )
    assert (await read_record(lab.bus, "r")).holds == {}


@pytest.mark.parametrize("kills", range(3))
async def test_killed_anywhere_it_goes_on_with_the_same_bits(lab, kills, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 11 + 7 * kills)
    monkeypatch.setattr("lachesis.pipeline.runtime.commitlog.SNAPSHOT_EVERY", 3)
    await stored(lab, 60)
    draw = np.random.default_rng(kills)
    for _ in range(4):
        with pytest.raises(lab.Killed):
            await shadow(lab, at(lab, 10**6), bus=_Dying(lab, int(draw.integers(1, 4))))
    result, _ = await shadow(lab, at(lab, 61))
    assert result.digest == (await replay(lab, "whole")).digest


async def test_by_default_it_begins_with_what_comes_next(lab):
    await stored(lab, 10)

    async def more():
        await lab.until(lambda: at(lab, 11)(None))
        await stored_more(lab, 20)

    selection = msgspec.structs.replace(FOLLOW, first_seq=None)
    result, _ = await shadow(lab, at(lab, 31), selection=selection, beside=more)
    assert [item.seq for event in await written(lab) for item in event.scores] == list(range(12, 32))
    whole = await replay(lab, "whole", Selection(envs=["sums"], first_seq=12))
    assert result.digest == whole.digest


async def stored_more(lab, count):
    for n in range(200, 200 + count):
        await lab.store(lab.group(n, samples=4, task={"answer": "yes"}))


async def test_a_silent_environment_holds_no_history(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SEQUENCES_AHEAD", 8)
    config = msgspec.structs.replace(CONFIG, environments={"sums": SUMS, "words": SUMS})
    selection = msgspec.structs.replace(FOLLOW, envs=["sums", "words"])
    await lab.store(lab.group(300, env="words", samples=4, task={"answer": "yes"}))
    await stored(lab, 30)
    held = []

    async def moved_on(_) -> bool:
        held[:] = [hold.needs[ROLLOUTS] for hold in (await read_record(lab.bus, "r")).holds.values()]
        events = await written(lab, env="words")
        return bool(events) and events[-1].commit.cursors[ROLLOUTS] > 8 and await at(lab, 32)(None)

    await shadow(lab, moved_on, selection=selection, config=config)
    result, _ = await shadow(lab, at(lab, 32), selection=selection, config=config)
    whole = await replay(lab, "whole", Selection(envs=["sums", "words"]), config=config)
    assert result.digest == whole.digest


async def test_its_hold_yields_and_what_was_trimmed_under_it_ends_it(lab):
    await stored(lab, 10)

    async def trimmed():
        await lab.until(lambda: at(lab, 11)(None))
        (hold,) = (await read_record(lab.bus, "r")).holds.values()
        assert hold.yields
        assert hold.about == "shadow again"
        await update_record(lab.bus, "r", lambda old: old.replace(trimmed={ROLLOUTS: 20}, holds={}))
        await stored_more(lab, 20)

    with pytest.raises(NotFoundError, match="trimmed ROLLOUTS below sequence 20, and revision again had come to 12"):
        await shadow(lab, at(lab, 31), beside=trimmed)
    with pytest.raises(NotFoundError, match="kept from sequence 20 on, not from 12"):
        await shadow(lab, at(lab, 31))


async def test_it_is_compared_with_the_live_run_as_both_go_on(lab):
    async def run():
        await stored(lab, 40)

    async def compared(service) -> bool:
        return service.vitals.metrics.get("shadow/pairs") == 39 and service.vitals.lag == 0

    async with (
        lab.running(lambda service: run_scorer(service, CONFIG), "scorer"),
        lab.running(lambda service: run_normalizer(service, CONFIG), "normalizer"),
    ):
        _, service = await shadow(lab, compared, beside=run)
    metrics = service.vitals.metrics
    assert metrics["shadow/rank_correlation"] == 1.0
    assert metrics["shadow/sign_flips"] == 0.0
    assert metrics["shadow/zero_variance"] == metrics["shadow/zero_variance_live"]
    assert metrics["shadow/position"] == 42
    assert service.vitals.handled == 41


async def test_it_makes_room_in_a_full_stream_and_goes_on(lab, monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._FULL_SHARE", 0.0)
    monkeypatch.setattr("lachesis.pipeline.offline.replay.stage._MAX_SAMPLES_PER_COMMIT", 10)
    monkeypatch.setattr("lachesis.pipeline.runtime.commitlog.SNAPSHOT_EVERY", 4)
    monkeypatch.setattr(lab.bus, "usage", _bounded(lab.bus.usage))
    await stored(lab, 60)
    result, _ = await shadow(lab, at(lab, 61))
    left = await written(lab)
    assert 0 < sum(len(event.scores) for event in left) < 60
    await stored_more(lab, 20)
    result, _ = await shadow(lab, at(lab, 81))
    assert result.digest == (await replay(lab, "whole")).digest


def _bounded(usage):
    async def bounded(stream):
        found = await usage(stream)
        return found.__class__(found.first, found.last, found.messages, found.bytes, 1 if stream == REPLAY else -1)

    return bounded


async def test_its_definition_is_that_of_a_replay_without_an_end(lab):
    await stored(lab, 10)
    await shadow(lab, at(lab, 11))
    with pytest.raises(ConfigError, match=r"selection\.follow was True, is None"):
        await replay(lab, "again", Selection(envs=["sums"], first_seq=1))
