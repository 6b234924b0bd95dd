"""Fixed samples: answers of the first groups that the raters rate again beside later groups."""

import anyio
import msgspec
import pytest
from stages import run_scorer
from unit.scorer.rank_rater import Ranks

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.fixed_samples import MAX_SAMPLES, FixedSampleSet, is_due
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas import keys
from lachesis.schemas.annotations import GroupScore, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import FixedSamples
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message

__all__ = ["Ranks"]  # named by its place here

KEY = keys.fixed_samples("live", "sums")
CALLS: list[Sample] = []


@rater(bounds=(0.0, 2.0), inline=True)
def right(sample: Sample) -> float:
    """Pay the answer of the task."""
    CALLS.append(sample)
    return 2.0 * (sample.completion == sample.task["answer"])


@rater(bounds=(0.0, 1.0), inline=True)
def away_again(sample: Sample) -> float:
    """Rate each sample once, and then fail as a service does that is away."""
    CALLS.append(sample)
    if CALLS.count(sample) > 1:
        raise ConnectionError("away")
    return 1.0


def scoring(*raters: str, share: float = 1.0) -> ScoringConfig:
    named = [RaterConfig(rater=f"{__name__}:{name}", name=name, breaker_failures=1) for name in raters]
    return ScoringConfig(raters=named, quorum=1, controls=0.0, fixed_samples=share)


def scorer(*raters: str) -> EnvironmentScorer:
    return EnvironmentScorer(scoring(*raters), None)


def group(lab, n: int, *completions: str, **changes):
    talk = [[Message(role="user", content=f"{n}?"), Message(role="assistant", content=text)] for text in completions]
    task = changes.pop("task", {"answer": "yes"})
    return msgspec.structs.replace(lab.group(n, task=task, messages=talk), item=f"i{n}", **changes)


def fixed_set(bus: MemoryBus, share: float = 1.0) -> FixedSampleSet:
    return FixedSampleSet(Service(bus, "scorer", "r"), "sums", share)


async def rated(samples: FixedSampleSet, one, by: EnvironmentScorer):
    return await samples.rate(one, await by.score(one, one.counter), by)


async def stored(bus) -> FixedSamples:
    entry = await bus.value(KEY)
    return FixedSamples() if entry is None else decode(FixedSamples, entry.value)


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


async def test_samples_of_the_first_groups_are_kept_and_rated_again_later(lab):
    by, samples = scorer("right", "Ranks"), fixed_set(lab.bus)
    for n in range(1, MAX_SAMPLES + 1):
        found = await rated(samples, group(lab, n, "no", "yes"), by)
        # in turn one of the best of its group and one of the worst; three ratings beside the group's own
        assert found.ratings == {"right": [1.0] * 3 if n % 2 else [0.0] * 3}
        assert (found.group, found.sample) == (group(lab, n, "no", "yes").id, n % 2)
    CALLS.clear()
    later = await rated(samples, group(lab, 99, "no", "no"), by)
    assert len((await stored(lab.bus)).samples) == MAX_SAMPLES
    first = {sample.group: sample for sample in (await stored(lab.bus)).samples}
    assert later.ratings == {"right": [float(first[later.group].sample)]}
    again = CALLS[-1]
    assert again.prompt == first[later.group].messages[0].content
    assert (again.task, again.item, again.env) == ({"answer": "yes"}, first[later.group].item, "sums")
    assert later.raters == {"right": by.rater_digests["right"]}  # ranks within a group are left out


async def test_a_sample_is_rated_again_exactly_as_it_was_rated_first(lab):
    by, samples = scorer("right"), fixed_set(lab.bus)
    one = group(lab, 1, "no", "yes", metadata={"prompt_opens": "<think>"})
    await rated(samples, one, by)
    assert CALLS[1] == CALLS[2] == CALLS[4]


async def test_replicas_and_later_lives_have_the_same_samples_and_a_group_delivered_twice_has_one(lab):
    by, one, other = scorer("right"), fixed_set(lab.bus), fixed_set(lab.bus)
    first = group(lab, 1, "no", "yes")
    found = await rated(one, first, by)
    assert await rated(other, first, by) == found  # killed before its score was stored
    async with anyio.create_task_group() as tasks:
        for n in range(2, 60):
            tasks.start_soon(rated, one if n % 2 else other, group(lab, n, "no", "yes"), by)
    for n in range(60, 120):
        await rated(one, group(lab, n, "no", "yes"), by)
    kept = (await stored(lab.bus)).samples
    assert len({sample.group for sample in kept}) == len(kept) == MAX_SAMPLES
    late = group(lab, 500, "no", "yes")
    assert await rated(fixed_set(lab.bus), late, by) == await rated(one, late, by)


async def test_no_more_than_half_are_of_groups_that_are_all_rated_alike(lab):
    by, samples = scorer("right"), fixed_set(lab.bus)
    for n in range(1, 60):
        await rated(samples, group(lab, n, "no", "no"), by)
    assert len((await stored(lab.bus)).samples) == MAX_SAMPLES / 2
    for n in range(60, 120):
        await rated(samples, group(lab, n, "no", "yes"), by)
    kept = (await stored(lab.bus)).samples
    assert [sample.alike for sample in kept] == [True] * 16 + [False] * 16
    assert sum(sample.messages[-1].content == "yes" for sample in kept) == 8


async def test_long_samples_are_left_out_and_all_together_are_bounded(lab):
    by, samples = scorer("right"), fixed_set(lab.bus)
    await rated(samples, group(lab, 1, "no", "yes"), by)
    await rated(samples, group(lab, 2, "x" * (200 << 10), "yes"), by)  # the worst one, whose turn it is
    await rated(samples, group(lab, 2, "no", "yes", task={"answer": "yes", "tests": "x" * (200 << 10)}), by)
    assert len((await stored(lab.bus)).samples) == 1
    for n in range(3, 60):
        await rated(samples, group(lab, n, "no", "yes", task={"answer": "yes", "tests": "x" * (120 << 10)}), by)
    assert len((await lab.bus.value(KEY)).value) <= 2 << 20
    assert len((await stored(lab.bus)).samples) >= 16


async def test_a_rating_that_fails_is_missing_and_is_no_failure_of_the_rater(lab):
    by, samples = scorer("away_again"), fixed_set(lab.bus)
    for n in range(1, 5):
        assert await rated(samples, group(lab, n, "no", "yes"), by) is None
    score = await by.score(group(lab, 9, "no", "yes"), 9)
    assert score.ratings == {"away_again": [1.0, 1.0]}  # the breaker, which opens at one failure, stays closed


async def test_what_cannot_be_read_is_chosen_again(lab, caplog):
    await lab.bus.put(KEY, b"not msgpack")
    by, samples = scorer("right"), fixed_set(lab.bus)
    assert await rated(samples, group(lab, 1, "no", "yes"), by) is not None
    assert len((await stored(lab.bus)).samples) == 1
    assert "others are chosen" in caplog.text


async def test_a_damaged_store_switches_it_off(lab, caplog):
    await lab.bus.put(KEY, b"x")
    lab.bus.damage_value(KEY)
    by, samples = scorer("right"), fixed_set(lab.bus)
    assert await rated(samples, group(lab, 1, "no", "yes"), by) is None
    assert await rated(samples, group(lab, 2, "no", "yes"), by) is None
    assert caplog.text.count("has no fixed samples") == 1


@pytest.mark.parametrize(
    "by", [scorer("Ranks"), EnvironmentScorer(ScoringConfig(), None)], ids=["ranks", "own rewards"]
)
async def test_without_a_rater_of_single_samples_nothing_is_stored(lab, by):
    one = group(lab, 1, "no", "yes")
    score = GroupScore(group=one.id, seq=1, item="i", policy_step=0, scores=[0.0, 1.0], ratings={}, lengths=[3, 3])
    assert await fixed_set(lab.bus).rate(one, score, by) is None
    assert await lab.bus.value(KEY) is None


def test_the_share_of_the_ratings_is_kept_whatever_the_size_of_groups():
    ids = [f"{n:032x}" for n in range(20000)]
    for size in (1, 8, 64):
        share = sum(is_due(one, 1 / 128, size) is not None for one in ids) / size / len(ids)
        assert share == pytest.approx(1 / 128, rel=0.2)
    assert not any(is_due(one, 0.0, 8) for one in ids)
    assert len({is_due(one, 1.0, 8) % 32 for one in ids}) == 32


async def test_scores_carry_them_and_do_not_depend_on_them(lab):
    plain = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", scoring=scoring("right", share=0.0))})
    config = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", scoring=scoring("right"))})
    for n in (1, 2):
        await lab.store(group(lab, n, "no", "yes"))

    async def scored():
        return [item for event in await lab.events("score", ScoreEvent, "sums") for item in event.groups]

    async def all_scored():
        return len(await scored()) == 2

    async with lab.running(lambda service: run_scorer(service, config), "scorer") as service:
        await lab.until(all_scored)
        assert service.vitals.metrics["reward/sums/fixed_ratings"] >= 3
    assert all(item.fixed is not None for item in await scored())
    for item in await scored():
        bare = await scorer("right").score(group(lab, item.seq, "no", "yes"), item.seq)
        assert msgspec.structs.replace(item, fixed=None, signals=None, stamps=[]) == bare
    events = await lab.events("score", ScoreEvent, "sums")
    assert events[0].ensemble == EnvironmentScorer(plain.scoring_of("sums"), None).digest


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"scoring\.fixed_samples is 1\.5; it is a share of the ratings"):
        ScoringConfig(fixed_samples=1.5)
