"""The rolling comparison agrees with the whole one, whatever the order, and is bounded."""

import random

import pytest

from lachesis.pipeline.offline.compare import rolling
from lachesis.pipeline.offline.compare.logic import ComparedGroup, ComparedRevision, compare
from lachesis.pipeline.offline.compare.rolling import RollingComparison, RollingFigures
from lachesis.schemas.annotations import GroupReward, GroupScore


def reward(
    n: int, scores: list[float | None], advantages: list[float | None], verdict: str = "trainable"
) -> GroupReward:
    return GroupReward(
        group=f"{n:032x}", seq=n + 1, item="i", policy_step=0, verdict=verdict, scores=scores, rewards=scores,
        advantages=advantages, snapshot="s", mean=None, std=None, range=None, n_valid=len(scores),
    )  # fmt: skip


def drawn(draw: random.Random, n: int) -> GroupReward:
    scores = [draw.random() for _ in range(4)]
    if draw.random() < 0.2:
        return reward(n, [0.5] * 4, [0.0] * 4, "zero_variance")
    return reward(n, scores, [x - 0.5 for x in scores])


@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_comparison_of_all_history(seed):
    draw = random.Random(seed)
    a, b = [drawn(draw, n) for n in range(60)], [drawn(draw, n) for n in range(60)]
    followed = RollingComparison()
    steps = [(followed.live, x) for x in a] + [(followed.shadow, x) for x in b] + [(followed.shadow, b[3])]
    draw.shuffle(steps)
    for take, one in steps:
        take(f"env{one.seq % 2}", [one])
    sides = []
    for name, rewards in (("a", a), ("b", b)):
        scores = {
            one.group: GroupScore(group=one.group, seq=one.seq, item="i", policy_step=0, scores=one.scores, ratings={},
                                  lengths=[1] * 4)
            for one in rewards
        }  # fmt: skip
        groups = {one.group: ComparedGroup(f"env{one.seq % 2}", scores[one.group], one) for one in rewards}
        sides.append(ComparedRevision(name, groups, 0, complete=True))
    whole = compare("r", *sides).metrics
    found = followed.figures()
    assert found.pairs == 60
    assert found.sign_flips == whole["sign_flips"]
    assert found.rank_correlation == pytest.approx(whole["rank_correlation"])
    assert (found.zero_variance_live, found.zero_variance) == (whole["zero_variance_a"], whole["zero_variance_b"])


def test_what_is_not_known_is_not_told():
    followed = RollingComparison()
    assert followed.figures() == RollingFigures()
    followed.live("e", [reward(1, [1.0, 0.0], [0.5, -0.5])])
    assert followed.figures() == RollingFigures()
    followed.shadow("e", [reward(1, [1.0, 1.0], [0.0, 0.0], "zero_variance")])
    found = followed.figures()
    assert (found.pairs, found.sign_flips, found.rank_correlation, found.zero_variance) == (1, None, None, 1.0)


def test_it_keeps_the_newest_and_no_more(monkeypatch):
    monkeypatch.setattr(rolling, "_MAX_WAITING", 10)
    followed = RollingComparison()
    for n in range(2000):
        followed.live("e", [reward(n, [1.0, 0.0], [0.5, -0.5])])
        followed.live("e", [reward(10_000 + n, [1.0, 0.0], [0.5, -0.5])])
        followed.shadow("e", [reward(n, [0.0, 1.0], [-0.5, 0.5])])
    found = followed.figures()
    assert (found.pairs, found.sign_flips) == (rolling.WINDOW_GROUPS, 1.0)
    kept = followed._envs["e"]
    assert max(len(kept.waiting[0]), len(kept.waiting[1]), len(kept.paired)) <= 10
