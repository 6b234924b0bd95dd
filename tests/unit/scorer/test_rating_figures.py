"""Agreement of raters over the newest groups."""

import random

import pytest

from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha
from lachesis.pipeline.scorer.logic.rating_figures import _GROUPS, RaterAgreement
from lachesis.schemas.annotations import GroupScore


def group(*raters: list[float | None], spread: float = 0.0) -> GroupScore:
    ratings = dict(zip("abc", raters, strict=False))
    return GroupScore(
        group="0" * 32, seq=1, item="i", policy_step=0, scores=[0.0] * len(raters[0]), ratings=ratings,
        lengths=[1] * len(raters[0]),
        disagreement=None if len(raters) < 2 else (spread, spread),
    )  # fmt: skip


def test_alpha_is_krippendorffs_of_all_ratings_and_old_groups_are_forgotten() -> None:
    rng = random.Random(0)
    agreement = RaterAgreement()
    for _ in range(3 * _GROUPS):
        agreement.add_group(group([1.0, 0.0], [0.0, 1.0], spread=9.0))
    whole = IntervalAlpha()
    for i in range(2 * _GROUPS):
        a = [rng.random() for _ in range(4)]
        b = [None if rng.random() < 0.1 else min(1.0, x + 0.1 * rng.random()) for x in a]
        agreement.add_group(group(list(a), b, spread=float(i % 2)))
        for unit in zip(a, b, strict=True):
            whole.add_unit(unit)
    told = agreement.metrics("sums")
    assert told["reward/sums/reliability_alpha"] == whole.alpha().value
    assert told["reward/sums/mean_disagreement"] == pytest.approx(0.5)


def test_one_rater_and_ratings_that_do_not_vary_have_no_alpha() -> None:
    agreement = RaterAgreement()
    agreement.add_group(group([1.0, 0.0]))
    assert agreement.metrics("sums") == {"reward/sums/rater/a": 0.5}
    agreement.add_group(group([1.0], [1.0]))
    ratings = {"reward/sums/rater/a": pytest.approx(2 / 3), "reward/sums/rater/b": 1.0}
    assert agreement.metrics("sums") == {"reward/sums/mean_disagreement": 0.0, **ratings}


def test_the_mean_rating_of_each_rater_is_of_the_newest_groups_and_of_what_was_rated() -> None:
    agreement = RaterAgreement()
    for _ in range(2 * _GROUPS):
        agreement.add_group(group([9.0, 9.0], [9.0, 9.0], spread=0.0))
    for _ in range(2 * _GROUPS):
        agreement.add_group(group([1.0, None], [0.25, 0.75], spread=0.0))
    agreement.add_group(group([1.0, 1.0], [None, None], spread=0.0))  # older ones are forgotten, newer ones begin
    told = agreement.metrics("sums")
    assert (told["reward/sums/rater/a"], told["reward/sums/rater/b"]) == (1.0, 0.5)
