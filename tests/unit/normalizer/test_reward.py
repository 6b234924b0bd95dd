"""From scores to a shaped reward: the textbook formula, and what a bonus can never do under any normalization."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lachesis.pipeline.batcher.whitening import whiten, whiten_batch
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.accumulator import Moments
from lachesis.pipeline.normalizer.logic.normalizer import EnvNormalizer, ReadyGroup
from lachesis.pipeline.normalizer.logic.ranks import RankCounts, RankTable
from lachesis.pipeline.normalizer.logic.reward import KEY, RewardRule
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.schemas.annotations import GroupScore, GroupShaping
from lachesis.schemas.ledger import GroupRef

SHAPING = RewardConfig(length_bounty_max=0.05)
RULE = RewardRule(AdvantageConfig(), SHAPING)


@st.composite
def groups(draw):
    """Scores, bonuses up to .5 of samples that failed, and the ceiling that a scorer gives: .9 where success is 1."""
    scores = draw(
        st.lists(st.one_of(st.none(), st.floats(0, 0.95), st.just(0.0), st.just(1.0)), min_size=1, max_size=8)
    )
    succeeded = [None if x is None else x >= 1 for x in scores]
    bonus = [draw(st.floats(0, 0.5)) if won is False else None for won in succeeded]
    shaping = GroupShaping(
        bonus=bonus, succeeded=succeeded, ceiling=0.9, markers={}, length=[0.0 if b is None else b for b in bonus]
    )
    return GroupScore(group="0" * 32, seq=1, item="i", policy_step=0, scores=scores, ratings={},
                      lengths=[1] * len(scores), shaping=shaping)  # fmt: skip


def made(score, config, success, mean=0.1, std=0.3):
    stats = Moments(count=1000, groups=100, mean=mean, std=std, low=0.0, high=1.0)
    counts = RankCounts()
    for value in (0.0, 0.0, 0.0, 0.5, 1.0):
        counts.add_group([value])
    table = RankTable.of([(1, counts)])
    config = NormalizationConfig(warmup_groups=0, warmup_samples=0, **config)
    snapshot = NormalizationSnapshot.build("e", 3, config, {KEY: stats}, {KEY: table}, success=success)
    return RULE.reward(ReadyGroup(score.group, 1, {KEY: score.scores}, snapshot, 1), score), snapshot


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(groups(), st.one_of(st.none(), st.floats(0, 1)))
def test_the_textbook_formula(score, success):
    """r = env + s min(cap, ...), for failed samples, at most min_success - .1; s is 1, also while nothing is
    known, and falls to 0 between .1 and .3."""
    reward, _ = made(score, {"mode": "none"}, success)
    s = Fraction(1)
    if success is not None:
        s = min(Fraction(1), max(Fraction(0), (Fraction("0.3") - Fraction(success)) / Fraction("0.2")))
    for env, bonus, base, added in zip(score.scores, score.shaping.bonus, reward.rewards, reward.shaping, strict=True):
        if env is None:
            assert base is added is None
            continue
        r = Fraction(env)
        if bonus is not None:
            r = max(r, min(r + s * Fraction(bonus), Fraction(score.shaping.ceiling)))
        assert base + added == pytest.approx(float(r), abs=1e-12)


MODES = [
    {"mode": "scale"}, {"mode": "zscore"}, {"mode": "rank"}, {"mode": "none"}, {"mode": "scale", "clip": 1.0},
    {"mode": "minmax", "bounds": {KEY: (0.0, 1.0)}}, {"mode": "minmax", "bounds": {KEY: (-5.0, 5.0)}},
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    groups(), st.sampled_from(MODES), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 1e-6, 0.05, 0.5, 40.0])
)
def test_a_bonus_is_never_blown_up_and_never_reaches_a_success(score, mode, success, mean, std):
    reward, snapshot = made(score, mode, success, mean, std)
    (top,) = snapshot.normalize(KEY, [score.shaping.ceiling])
    for env, bonus, base, added in zip(score.scores, score.shaping.bonus, reward.rewards, reward.shaping, strict=True):
        if env is None:
            continue
        assert 0 <= added <= (bonus or 0.0), "in units of the score, whatever the rewards are divided by"
        if added:
            assert base + added <= top + 1e-9 * max(1.0, abs(top))


@given(groups(), st.floats(0, 0.09))
def test_the_verdict_and_what_describes_the_rewards_are_without_shaping(score, success):
    plain = GroupScore(**{name: getattr(score, name) for name in ("group", "seq", "item", "policy_step", "scores",
                                                                  "ratings", "lengths")})  # fmt: skip
    shaped, _ = made(score, {"mode": "scale"}, success)
    bare, _ = made(plain, {"mode": "scale"}, success)
    assert (shaped.verdict, shaped.mean, shaped.std, shaped.range) == (bare.verdict, bare.mean, bare.std, bare.range)
    assert shaped.rewards == bare.rewards
    assert bare.shaping == []
    if bare.verdict == "zero_variance":
        added = [b for b in shaped.shaping if b is not None]
        assert shaped.trains == (max(added) - min(added) > 1e-6)


def test_statistics_are_of_the_scores_that_reliability_weights_made():
    rule = RewardRule(AdvantageConfig(), RewardConfig(), reliability=True)
    norm = EnvNormalizer("e", NormalizationConfig(window=1, warmup_groups=1, warmup_samples=2, decay=1.0), rule.finish)
    final = []
    for seq in range(1, 41):
        ratings = {"a": [0.0, 1.0], "b": [0.1, 0.9], "c": [(seq % 3) / 2, (seq % 2) / 1]}
        scores = [sum(column[i] for column in ratings.values()) / 3 for i in range(2)]
        score = GroupScore(group=f"{seq:032x}", seq=seq, item="i", policy_step=0, scores=scores, ratings=ratings,
                           lengths=[1, 1])  # fmt: skip
        norm.member(seq, score.group)
        norm.resolve(score.group, seq, rule.columns(score))
        (ready,) = norm.step().ready
        final.append(list(ready.values[KEY]))
        assert (final[-1] == scores) == (seq <= 2)
    closed = [value for column in final for value in column]
    assert norm.snapshot().keys[KEY].mean == pytest.approx(sum(closed) / len(closed), abs=1e-9)


def test_an_excluded_sample_has_no_weight_in_whitening():
    """It counts in its group's statistics, and neither in the batch's mean nor in its deviation."""
    rule = RewardRule(AdvantageConfig(estimator="reinforce++-baseline"), RewardConfig())
    snapshot = NormalizationSnapshot.build("e", -1, NormalizationConfig(mode="none"), {})

    def rewarded(n, scores, lengths, excluded=()):
        score = GroupScore(
            group=f"{n:032x}", seq=n, item="i", policy_step=0, scores=scores, ratings={}, lengths=lengths,
            excluded=list(excluded),
        )  # fmt: skip
        return rule.reward(ReadyGroup(score.group, n, {KEY: scores}, snapshot, 1), score)

    first, second = rewarded(1, [0.0, 1.0, 8.0], [2, 3, 50], [2]), rewarded(2, [0.0, 1.0], [4, 5])
    assert (first.lengths, first.mean, first.tokens) == ([2, 3, 0], 3.0, 55)
    refs = [
        GroupRef(group=one.group, seq=one.seq, env="e", sequences=1, tokens=1, policy_step=0, advantages=one.advantages)
        for one in (first, second)
    ]
    done = whiten_batch(refs, {1: first.lengths, 2: second.lengths}, 1e-3)
    expected = whiten([-3.0, -2.0, -0.5, 0.5], [2, 3, 4, 5])
    assert [*done[0].advantages[:2], *done[1].advantages] == expected
