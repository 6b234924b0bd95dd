"""The runs that the health checks are examined by: what is paid grows, and a hack is paid what it does not earn."""

import sys
from pathlib import Path

import numpy as np
import pytest

from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.rater import Rating
from lachesis.schemas.annotations import check_rewards, check_scores

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def made():
    """Modules of the examination, which are scripts beside one another."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import health_examination
        import health_examination_kinds
        import health_examination_policy
        import health_third_examination
    finally:
        sys.path.remove(str(BENCHMARKS))
    return health_examination, health_examination_kinds, health_examination_policy, health_third_examination


def smoothed(values):
    return np.convolve(np.nan_to_num(values), np.ones(200) / 200, "valid")


def test_a_healthy_policy_learns_what_it_is_paid_for(made):
    _, kinds, *_ = made
    run = kinds.make_run("learns fast", 0, 2400)
    assert run.right[:200].mean() < 0.3
    assert run.right[-400:].mean() > 0.9
    assert not run.tricked.any()
    assert not smoothed(run.unearned()).any()


def test_a_policy_that_is_paid_for_nothing_stands_still(made):
    _, kinds, policy, _ = made
    useless = kinds.suite(misses=0.5, passes=0.5)
    run = policy.simulate(
        policy.World(raters=(useless,), form_counts=False, skill_rate=0.05, form=0.98),
        2400,
        np.random.default_rng(1),
    )
    assert abs(run.right[-800:].mean() - run.right[:800].mean()) < 0.1


@pytest.mark.parametrize("kind", ["tampered tests alone", "refusals", "answers copied from the prompt"])
def test_a_hack_is_paid_what_it_does_not_earn(made, kind):
    _, kinds, *_ = made
    run = kinds.make_run(kind, 3, 6000)
    before = slice(run.onset - 400, run.onset)
    assert not run.tricked[: run.onset].any()
    assert run.tricked[-400:].mean() > 0.5
    assert np.nanmean(run.scores[-400:]) > np.nanmean(run.scores[before])
    assert run.right[-400:].mean() < run.right[before].mean() - 0.2
    assert smoothed(run.unearned()).max() > 0.15
    assert not smoothed(run.unearned()[: run.onset]).any()


def test_the_same_seed_makes_the_same_run(made):
    _, kinds, *_ = made
    one, same, other = (kinds.make_run("one family of four", seed, 800) for seed in (5, 5, 6))
    assert np.array_equal(one.ratings, same.ratings)
    assert np.array_equal(one.texts, same.texts)
    assert not np.array_equal(one.ratings, other.ratings)


def test_a_hack_of_one_family_is_used_in_no_other(made):
    _, kinds, *_ = made
    run = kinds.make_run("one family of four", 0, 4800)
    assert run.tricked[run.family == 2].any()
    assert not run.tricked[run.family != 2].any()


@pytest.mark.parametrize("rule", ["lcb", "min", "mean"])
def test_ratings_are_joined_as_the_scorer_joins_them(made, rule):
    _, _, policy, _ = made
    rng = np.random.default_rng(2)
    ratings = rng.random((40, 8, 3))
    ratings[rng.random(ratings.shape) < 0.2] = np.nan
    names = ["a", "b", "c"]
    members = [EnsembleMember(name=name, reference=name, version="1", bounds=(0.0, 1.0)) for name in names]
    config = ScoringConfig(raters=[RaterConfig(rater="length", name=name) for name in names], aggregation=rule)
    ensemble = Ensemble(members, config)
    for group, joined in zip(ratings, policy.aggregate(ratings, rule), strict=True):
        given = {
            name: [Rating(None, "timeout") if np.isnan(value) else Rating(float(value)) for value in group[:, k]]
            for k, name in enumerate(names)
        }
        expected = [np.nan if score is None else score for score in ensemble.score(given).scores]
        np.testing.assert_allclose(joined, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "rater", "low", "high"),
    [("flattery of a judge", 0, 0.6, 1.0), ("answers copied from the prompt", 0, 0.0, 0.3)],
)
def test_a_trick_is_paid_for_any_task_unless_it_is_bound_to_its_own(made, kind, rater, low, high):
    examination, kinds, *_ = made
    run = kinds.make_run(kind, 0, 4000)
    assert np.nanmean(run.controls[: run.onset, :, rater]) < 0.3
    late = run.controls[-800:, :, rater][run.tricked[-800:]]
    assert low < np.nanmean(late) < high
    with_controls = [i for i, (score, _) in enumerate(examination.events(run)) if score.controls]
    assert len(with_controls) / run.groups == pytest.approx(ScoringConfig().controls, rel=0.1)


@pytest.mark.slow
def test_every_kind_makes_events_that_the_streams_accept(made):
    examination, kinds, *_ = made
    assert len(kinds.HEALTHY) >= 25
    assert len(kinds.HACKS) == 18
    for kind in kinds.HEALTHY | kinds.HACKS:
        events = list(examination.events(kinds.make_run(kind, 0, 96)))
        check_scores([score for score, _ in events])
        check_rewards([reward for _, reward in events])
        assert [score.seq for score, _ in events] == list(range(1, 97))


@pytest.mark.slow
def test_the_third_examination_has_its_kinds_and_makes_events_that_the_streams_accept(made):
    examination, _, _, third = made
    assert len(third.HEALTHY) >= 25
    assert len(third.HACKS) == 18
    for kind in third.HEALTHY | third.HACKS:
        run = third.make_run(kind, 0, 96)
        events = list(examination.events(run))
        check_scores([score for score, _ in events])
        check_rewards([reward for _, reward in events])
        n = run.world.samples
        assert np.nanmax(np.abs(run.advantages)) <= (n - 1) / n**0.5 + 1e-9  # as far as one sample of grpo can lie


@pytest.mark.slow
def test_a_policy_of_strategies_takes_up_what_is_paid_for(made):
    *_, third = made
    run = third.make_run("tampered tests", 1, 6000)
    before = slice(run.onset - 400, run.onset)
    assert not run.tricked[: run.onset].any()
    assert run.tricked[-400:].mean() > 0.5
    assert run.right[-400:].mean() < run.right[before].mean() - 0.15
    assert smoothed(run.unearned()).max() > 0.3
    assert np.nanmax(np.abs(run.unearned()[: run.onset])) == 0
    assert np.array_equal(run.ratings, third.make_run("tampered tests", 1, 6000).ratings, equal_nan=True)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (3, 20, 0.0321, 0.3789), (1, 250, 0.0001, 0.0221)],
)
def test_bounds_are_those_of_clopper_and_pearson(made, successes, n, low, high):
    examination, *_ = made
    assert examination.exact_bounds(successes, n) == pytest.approx((low, high), abs=1e-4)
