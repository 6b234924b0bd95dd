"""Shaping and reliability weights live: scorers and normalizer together, any number of scorers, any order of arrival,
kills; and a replay of the same history. Equal bits everywhere."""

import random
from contextlib import AsyncExitStack

import anyio
import msgspec
import pytest
from stages import run_normalizer, run_scorer

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import FormatMarker, RewardConfig
from lachesis.pipeline.normalizer.logic.reward import reliability_shares
from lachesis.pipeline.offline.replay.logic.fold import RewardFold
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.schemas import subjects
from lachesis.schemas.annotations import RewardEvent, ScoreEvent
from lachesis.schemas.codec import encode
from lachesis.schemas.rollout import Message
from lachesis.services.stage_settings import reward_settings

pytestmark = pytest.mark.outside

GROUPS = 90
NORMALIZATION = NormalizationConfig(window=4, warmup_samples=8, warmup_groups=2)
SHAPED = RunConfig(
    run="r",
    environments={
        "sums": EnvironmentConfig(
            kind="x",
            normalization=NORMALIZATION,
            reward_config=RewardConfig(
                format_markers=[FormatMarker(marker="<think>", reward=0.1)], length_bounty_max=0.05, length_to=16
            ),
        )
    },
)
PLAIN = RunConfig(run="r", environments={"sums": EnvironmentConfig(kind="x", normalization=NORMALIZATION)})
RELIABLE = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x")},
    normalization=NORMALIZATION,
    scoring=ScoringConfig(
        aggregation="reliability",
        raters=[
            RaterConfig(rater="length", params={"shortest": 8, "ramp": 8}),
            RaterConfig(rater="repetition"),
            RaterConfig(rater="format", params={"pattern": ".*b.*"}),
        ],
    ),
)


def a_group(lab, n, env="sums"):
    """Eight samples; success is rare at first and usual in the end."""
    rng = random.Random(n)
    wins = [float(rng.random() < 0.6 * n / GROUPS) for _ in range(8)]
    texts = [
        ("<think>a</think> " if rng.random() < 0.5 else "") + " ".join(rng.choices("abc", k=rng.randint(1, 9)))
        for _ in wins
    ]
    talk = [[Message(role="assistant", content=text)] for text in texts]
    return lab.group(n, samples=8, tokens=rng.randint(2, 16), messages=talk, rewards={"environment": wins}, env=env)


async def rewards(lab):
    found = [item for event in await lab.events("reward", RewardEvent) for item in event.groups]
    assert len(found) == len({item.group for item in found}), "each exactly once"
    return {item.group: msgspec.structs.replace(item, stamps=[]) for item in found}


async def score_again(lab, rng, name):
    """Store some scores once more, as scorers do whose acknowledgements were lost."""
    events = await lab.events("score", ScoreEvent)
    for n, event in enumerate(rng.sample(events, len(events) // 3)):
        subject = subjects.event("score", "r", "live", "sums")
        await lab.bus.publish(subject, encode(event), msg_id=f"again {name} {n}")


async def live(lab, config, scorers, seed, monkeypatch, *, kill=False, neighbours=0):
    """Run `scorers` replicas and the normalizer while rollouts come; scores arrive in an order of their own.

    Up to so many `neighbours` of another environment come before each of them.
    """
    rng, score = random.Random(seed), EnvironmentScorer.score

    async def slow(self, group, seq):
        for _ in range(rng.randint(0, 40)):
            await anyio.lowlevel.checkpoint()
        return await score(self, group, seq)

    monkeypatch.setattr(EnvironmentScorer, "score", slow)

    async def all_rewarded():
        return len(await rewards(lab)) == GROUPS

    async with AsyncExitStack() as stack:
        for _ in range(scorers):
            await stack.enter_async_context(lab.running(lambda service: run_scorer(service, config), "scorer"))
        for part in range(3):
            async with lab.running(lambda service: run_normalizer(service, config), "normalizer") as service:
                for n in range(part * GROUPS // 3, (part + 1) * GROUPS // 3):
                    for other in range(rng.randint(0, neighbours)):
                        await lab.store(a_group(lab, 1000 * (other + 1) + n, env="other"))
                    await lab.store(a_group(lab, n))
                    await anyio.lowlevel.checkpoint()
                if kill and part < 2:
                    service.kill()
                    await score_again(lab, rng, f"{part}")
                elif part == 2:
                    await lab.until(all_rewarded)
    monkeypatch.setattr(EnvironmentScorer, "score", score)
    return await rewards(lab)


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, SHAPED, RELIABLE], ids=["plain", "shaped", "reliable"])
@pytest.mark.parametrize(("scorers", "seed"), [(1, 7), (2, 1), (5, 2)])
async def test_the_same_bits_for_one_scorer_and_for_more_killed_or_not(lab, config, scorers, seed, monkeypatch):
    once = await live(lab, config, 1, 0, monkeypatch)
    other = type(lab)(type(lab.bus)())
    again = await live(other, config, scorers, seed, monkeypatch, kill=True)
    orders = [
        [item.seq for event in await one.events("score", ScoreEvent) for item in event.groups] for one in (lab, other)
    ]
    assert orders[0] != sorted(orders[0]), "arrivals straddle windows"
    assert orders[0] != orders[1]
    assert again == once


@pytest.mark.slow
@pytest.mark.parametrize("config", [PLAIN, SHAPED, RELIABLE], ids=["plain", "shaped", "reliable"])
async def test_what_neighbours_store_changes_no_reward_and_a_replay_gives_the_same_bits(lab, config, monkeypatch):
    alone = await live(lab, config, 1, 0, monkeypatch)
    both = msgspec.structs.replace(config, environments=config.environments | {"other": EnvironmentConfig(kind="x")})
    beside = type(lab)(type(lab.bus)())
    found = await live(beside, both, 2, 1, monkeypatch, kill=True, neighbours=9)
    assert max(item.seq for item in found.values()) > 3 * GROUPS
    assert len({item.snapshot for item in found.values()}) > 10

    def without_place(items):
        return {name: msgspec.structs.replace(item, seq=1) for name, item in items.items()}

    assert without_place(found) == without_place(alone)
    fold = RewardFold("sums", config.normalization_of("sums"), reward_settings(config)["sums"].rule())
    scores = {item.seq: item for event in await beside.events("score", ScoreEvent) for item in event.groups}
    for seq, score in sorted(scores.items()):
        fold.add_group(seq, score.group, score)
    assert {item.group: item for item in fold.step().rewards} == found


@pytest.fixture(autouse=True)
def a_short_memory(monkeypatch):
    monkeypatch.setattr("lachesis.pipeline.normalizer.logic.bonus_fade.MIN_GROUPS", 8)  # of 90 groups in all


async def test_shaping_is_there_from_the_start_and_never_comes_back(lab, monkeypatch):
    found = sorted((await live(lab, SHAPED, 2, 3, monkeypatch)).values(), key=lambda item: item.seq)
    scales = [item.shaping_scale for item in found]
    assert scales[0] == 1.0, "nothing is known yet"
    assert scales == sorted(scales, reverse=True)
    assert scales[-1] == 0.0
    assert any(0 < value < 1 for value in scales)
    for item in found:
        assert all(added == 0.0 for added, score in zip(item.shaping, item.scores, strict=True) if score == 1.0)
    silent = [item for item in found if item.verdict == "zero_variance" and item.trains]
    assert silent, "groups in which nothing succeeds are trained on their form"
    for item in silent:
        mean = sum(item.shaping) / 8
        assert item.advantages == pytest.approx([added - mean for added in item.shaping])


@pytest.mark.slow
@pytest.mark.parametrize("config", [SHAPED, RELIABLE], ids=["shaped", "reliable"])
async def test_a_replay_gives_the_same_bits_however_it_is_cut(lab, config, monkeypatch):
    once = await live(lab, config, 2, 5, monkeypatch)
    scores = sorted(
        (item for event in await lab.events("score", ScoreEvent) for item in event.groups), key=lambda item: item.seq
    )

    def make():
        return RewardFold("sums", config.normalization_of("sums"), reward_settings(config)["sums"].rule())

    rng, fold, deltas, state, found = random.Random(1), make(), [], None, []
    for score in scores:
        fold.add_group(score.seq, score.group, score)
        if rng.random() < 0.3:
            folded = fold.step()
            found += folded.rewards
            deltas.append(folded.delta)
            if rng.random() < 0.2:
                state, deltas = fold.state(), []
            fold = make()
            fold.restore(state, deltas)
    found += fold.step().rewards
    assert {item.group: item for item in found} == once


@pytest.mark.slow
async def test_raters_that_disagree_with_the_others_weigh_less(lab, monkeypatch):
    found = await live(lab, RELIABLE, 1, 0, monkeypatch)
    scores = {item.group: item for event in await lab.events("score", ScoreEvent) for item in event.groups}
    first, last = min(found.values(), key=lambda item: item.seq), max(found.values(), key=lambda item: item.seq)
    assert first.scores == scores[first.group].scores, "raters weigh alike while nothing is known"
    assert last.scores != scores[last.group].scores
    fold = RewardFold("sums", NORMALIZATION, reward_settings(RELIABLE)["sums"].rule())
    for score in sorted(scores.values(), key=lambda item: item.seq):
        fold.add_group(score.seq, score.group, score)
    fold.step()
    weights = reliability_shares(fold._normalizer.snapshot(fold._normalizer._windows.of(last.seq) - 2))
    ratings = scores[last.group].ratings
    assert last.scores[0] == pytest.approx(sum(weights[name] * ratings[name][0] for name in weights))
    assert weights["format"] < weights["repetition"] <= 0.5
