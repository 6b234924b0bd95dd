"""Aggregation: every rule by hand, quorum, missing ratings, calibration, digest."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember
from lachesis.pipeline.scorer.rater import Rating
from lachesis.schemas.errors import ConfigError, DataError


def ensemble(n=4, weights=None, bounds=(0.0, 1.0), **config):
    raters = [RaterConfig(rater=f"m:r{i}") for i in range(n)]
    members = [
        EnsembleMember(
            name=f"r{i}", reference=f"m:r{i}", version="1", bounds=bounds, weight=1.0 if weights is None else weights[i]
        )
        for i in range(n)
    ]
    return Ensemble(members, ScoringConfig(raters=raters, **config))


def column(*values):
    return [Rating(None, "timeout") if value is None else Rating(value) for value in values]


def one(made, *values):
    """Score a single sample."""
    return made.score({f"r{i}": column(value) for i, value in enumerate(values)}).scores[0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("mean", 0.5), ("median", 0.4), ("trimmed", 0.4), ("min", 0.2), ("uwo", 0.5 - 0.5 * 0.09), ("majority", 0.0)],
)
def test_rules_by_hand(rule, expected):
    assert one(ensemble(aggregation=rule), 0.2, 0.4, 0.4, 1.0) == pytest.approx(expected)


def test_lcb_and_weighted():
    assert one(ensemble(aggregation="lcb", penalty=2.0), 0.2, 0.4, 0.4, 1.0) == pytest.approx(0.5 - 2 * 0.3)
    assert one(ensemble(aggregation="lcb"), 0.2, 0.4, 0.4, 1.0) == pytest.approx(0.5 - 0.3 / 3**0.5)
    made = ensemble(aggregation="weighted", weights=[1, 1, 2, 4])
    assert one(made, 0.0, 1.0, 0.5, 1.0) == pytest.approx(6 / 8)
    assert one(made, 0.0, 1.0, None, 1.0) == pytest.approx(5 / 6), "weights count among the raters present"


def test_a_tie_has_no_majority():
    assert one(ensemble(aggregation="majority"), 0.9, 0.9, 0.1, 0.1) is None
    assert one(ensemble(aggregation="majority"), 0.9, 0.9, None, 0.1) == 1.0
    assert one(ensemble(aggregation="majority"), 0.5, 0.5, None, 0.9) == 0.0, "yes is above the threshold, not at it"


def test_votes_weigh_by_what_is_known_of_the_raters():
    made = ensemble(aggregation="dawid_skene", weights=[3.0, 1.0, 1.0, 0.5])
    assert one(made, 0.9, 0.1, 0.1, 0.1) == 1.0, "a sure rater outvotes three doubtful ones"
    assert one(made, 0.1, 0.9, 0.9, 0.9) == 0.0
    assert one(made, None, 0.9, 0.1, 0.9) == 1.0, "weights count among the raters present"
    assert one(made, None, 0.9, 0.1, None) is None, "a tie"
    assert made.digest != ensemble(aggregation="dawid_skene", weights=[3.0, 1.0, 1.0, 0.6]).digest


@pytest.mark.parametrize("weights", [[0.1, 0.2, 0.3], [0.3, 0.1, 0.2], [1.1, 2.2, 3.3], [1e-3, 1e15, 1e15 + 1e-3]])
def test_weights_that_are_written_alike_on_both_sides_are_a_tie(weights):
    """.1 + .2 is .30000000000000004 in floats."""
    made = ensemble(3, aggregation="dawid_skene", weights=weights)
    heaviest = weights.index(max(weights))
    votes = [0.9 if i == heaviest else 0.1 for i in range(3)]
    tied = weights[-1] < 1e15  # 1e15 + 1e-3 is 1e15 already as a number
    assert one(made, *votes) == (None if tied else 0.0)
    assert one(made, *[1 - vote for vote in votes]) == (None if tied else 1.0)


def test_trimmed_is_refused_where_it_drops_nothing():
    for n, settings in ((3, {}), (4, {"trim": 0.2}), (4, {"trim": 0.0}), (4, {"quorum": 3}), (2, {})):
        with pytest.raises(ConfigError, match=r"trimmed drops nothing of \d ratings.*it is their mean.*median"):
            ensemble(n, aggregation="trimmed", **settings)
    made = ensemble(5, aggregation="trimmed")
    assert made.quorum == 4
    assert one(made, 0.0, 0.4, 0.5, 1.0, None) == pytest.approx(0.45)
    assert one(made, 0.0, 0.4, 1.0, None, None) is None, "of three nothing would be dropped"
    assert ensemble(12, aggregation="trimmed").quorum == 6
    assert ensemble(3, aggregation="trimmed", trim=0.34).quorum == 3


def test_borda_ignores_scale():
    made = ensemble(n=2, aggregation="borda", bounds=(0.0, 100.0))
    scores = made.score({"r0": column(1.0, 2.0, 3.0), "r1": column(1.0, 50.0, 99.0)}).scores
    assert scores == [-0.5, 0.0, 0.5]
    tied = made.score({"r0": column(1.0, 1.0, 3.0), "r1": column(5.0, 5.0, 5.0)}).scores
    assert tied == pytest.approx([-0.125, -0.125, 0.25])


def test_missing_is_left_out_and_never_zero():
    made = ensemble(aggregation="mean")
    assert one(made, 0.8, 0.8, 0.8, None) == pytest.approx(0.8)
    scores = made.score(
        {"r0": column(None, 0.5), "r1": column(None, 0.5), "r2": column(None, 0.5), "r3": column(1.0, 0.5)}
    )
    assert scores.scores == [None, 0.5]
    assert scores.unscorable == [0]
    assert scores.statuses["r0"] == ["timeout", "ok"]
    assert "r3" not in scores.statuses


@pytest.mark.parametrize(("raters", "quorum"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (7, 4)])
def test_default_quorum(raters, quorum):
    assert ensemble(raters, aggregation="mean").quorum == quorum
    assert ensemble(raters, aggregation="min").quorum == raters, "a worst case with one missing is no worst case"


def test_default_rule_is_not_the_mean():
    assert ensemble(3).aggregation == "lcb"
    assert ensemble(2).aggregation == "min"


def test_bounds_map_every_rater_to_one_scale():
    scores = ensemble(2, aggregation="mean", bounds=(-10.0, 30.0)).score({"r0": column(-10.0), "r1": column(30.0)})
    assert scores.ratings == {"r0": [0.0], "r1": [1.0]}
    assert scores.scores == [0.5]
    assert scores.disagreement == (0.5, 0.5)


def test_disagreement_needs_two_ratings():
    made = ensemble(2)
    assert made.score({"r0": column(0.5, 0.1), "r1": column(None, 0.3)}).disagreement == pytest.approx((0.1, 0.1))
    assert made.score({"r0": column(0.5), "r1": column(None)}).disagreement is None


def test_wrong_shapes_are_data_errors():
    with pytest.raises(DataError, match="the ensemble is"):
        ensemble(2).score({"r0": column(1.0)})
    with pytest.raises(DataError, match="different numbers"):
        ensemble(2).score({"r0": column(1.0), "r1": column(1.0, 2.0)})


def test_wrong_settings_are_config_errors():
    with pytest.raises(ConfigError, match="different names"):
        Ensemble([], ScoringConfig())
    with pytest.raises(ConfigError, match="quorum"):
        ensemble(2, quorum=3)
    with pytest.raises(ConfigError, match="dawid_skene needs 3 raters"):
        ensemble(2, aggregation="dawid_skene")
    with pytest.raises(ConfigError, match="trim"):
        ensemble(2, trim=0.5)


def test_the_digest_follows_everything_scores_depend_on():
    made = [ensemble(), ensemble(3), ensemble(penalty=0.1), ensemble(aggregation="mean"), ensemble(quorum=4)]
    made += [ensemble(weights=[1, 2, 3, 4]), ensemble(bounds=(0.0, 2.0))]
    assert len({m.digest for m in made}) == len(made)
    assert ensemble().digest == ensemble().digest


ratings = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(ratings, st.sampled_from(["mean", "median", "trimmed", "min", "uwo", "lcb", "borda"]), st.permutations(range(4)))
def test_scores_do_not_depend_on_the_order_of_raters_and_stay_in_range(values, rule, order):
    made = ensemble(aggregation=rule)
    score = one(made, *values)
    assert score == one(made, *(values[i] for i in order))
    if rule not in ("uwo", "lcb", "borda"):
        assert min(values) - 1e-12 <= score <= max(values) + 1e-12


def test_the_default_prefers_agreement_to_one_exploited_rater():
    exploited, honest = (1.0, 0.1, 0.1, 0.1), (0.3, 0.3, 0.3, 0.3)
    assert one(ensemble(aggregation="mean"), *exploited) > one(ensemble(aggregation="mean"), *honest)
    assert one(ensemble(), *exploited) < one(ensemble(), *honest)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.data())
def test_by_default_no_rater_lifts_a_score_beyond_what_the_others_say(values, data):
    made = ensemble(len(values), aggregation="lcb")
    score = one(made, *values)
    others = sorted(values)[:-1]
    assert min(values) - 1e-9 <= score <= sum(others) / len(others) + 1e-9
    i = data.draw(st.integers(0, len(values) - 1))
    raised = data.draw(st.floats(values[i], 1))
    assert one(made, *values[:i], raised, *values[i + 1 :]) >= score - 1e-9, "and better ratings never cost anything"


def test_the_default_of_two_raters_is_their_worst_case():
    assert one(ensemble(2, aggregation="lcb"), 0.3, 0.9) == pytest.approx(one(ensemble(2), 0.3, 0.9)) == 0.3
    assert one(ensemble(3, quorum=1), 0.7, None, None) == 0.7


@pytest.mark.parametrize("raters", [3, 4, 5])
def test_the_best_of_many_by_the_default_is_good_where_one_rater_can_be_exploited_and_by_the_mean_is_not(raters):
    """Ratings use a tenth of their bounds; tests/benchmarks/best_of_n.py has the figures of every rule."""
    rng, picked = random.Random(raters), {"default": [], "mean": []}
    rules = {"default": ensemble(raters), "mean": ensemble(raters, aggregation="mean")}
    for _ in range(25):
        gold, columns = [], {f"r{i}": [] for i in range(raters)}
        for _ in range(256):
            exploited = rng.random() < 0.2
            gold.append(rng.gauss(0, 1) - exploited)
            for i, column in enumerate(columns.values()):
                seen = gold[-1] + rng.gauss(0, 0.5) + (16 * rng.random() if exploited and i == 0 else 0)
                column.append(Rating(min(1.0, max(0.0, 0.5 + seen / 20))))
        for name, rule in rules.items():
            scores = rule.score(columns).scores
            picked[name].append(gold[scores.index(max(scores))])
    default, mean = (sum(values) / len(values) for values in picked.values())
    assert default > 2.4
    assert default > mean + 0.6
