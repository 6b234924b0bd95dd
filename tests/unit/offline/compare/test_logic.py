"""Comparison statistics against hand-worked cases, and a planted rater that games the score."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.offline.compare.condition import parse_condition
from lachesis.pipeline.offline.compare.logic import METRICS, ComparedGroup, ComparedRevision, compare
from lachesis.pipeline.offline.compare.statistics import distribution, histograms, rank_correlation, within_groups
from lachesis.schemas.annotations import GroupReward, GroupScore, Stamp
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message
from lachesis.services.observe.comparison import report
from lachesis.services.observe.comparison_page import markdown, page


def judged(
    n: int, scores, *, ratings=None, advantages=None, verdict="trainable", env="sums", lengths=None
) -> ComparedGroup:
    name = f"{n:032x}"
    score = GroupScore(
        group=name, seq=n, item="i", policy_step=0, scores=scores, ratings=ratings or {},
        lengths=lengths or [1] * len(scores), stamps=[Stamp("scorer", 0, 0, 500_000_000)],
    )  # fmt: skip
    reward = None
    if advantages is not None:
        reward = GroupReward(
            group=name, seq=n, item="i", policy_step=0, verdict=verdict, scores=scores, rewards=scores,
            advantages=advantages, snapshot="s", mean=None, std=None, range=None, n_valid=len(scores),
        )  # fmt: skip
    return ComparedGroup(env, score, reward)


def revision(name: str, *groups: ComparedGroup, unscored: int = 0) -> ComparedRevision:
    return ComparedRevision(name, {one.score.group: one for one in groups}, unscored, complete=True)


def test_rank_correlation_with_ties_and_missing_values():
    # ranks 1 2.5 2.5 4 and 1 2 3 4: r = 4.5 / sqrt(4.5 * 5)
    assert rank_correlation([1, 2, 2, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert rank_correlation([1, None, 2, 3], [3, 9, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, None], [1, 2]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=30, unique=True), st.randoms())
def test_rank_correlation_sees_order_alone(values, random):
    if len({x**3 for x in values}) == len(values):
        assert rank_correlation(values, [x**3 for x in values]) == pytest.approx(1)
    other = list(values)
    random.shuffle(other)
    rho = rank_correlation(values, other)
    assert rho == rank_correlation(other, values)
    assert -1 <= rho <= 1


def test_distributions_count_what_is_missing():
    found = distribution([1.0, None, 3.0])
    assert (found.n, found.missing, found.mean, found.std, found.median) == (2, 1, 2.0, 1.0, 2.0)
    assert distribution([None]) is None
    edges, a, b = histograms([0.0, None, 1.0], [0.5], bins=2)
    assert (edges, a, b) == ([0.0, 0.5, 1.0], [1, 1], [0, 1])
    assert histograms([None], []) == ([], [], [])


def test_correlation_within_groups_ignores_differences_between_them():
    assert within_groups([([0.0, 1.0], [1, 2]), ([10.0, 11.0], [2, 3])]) == pytest.approx(1)
    assert within_groups([([5.0, 5.0], [1, 2])]) is None


def test_signs_verdicts_and_groups_of_one_side_are_counted_apart():
    a = revision(
        "live",
        judged(1, [0.0, 1.0], advantages=[-0.5, 0.5]),
        judged(2, [0.0, 1.0], advantages=[-0.5, 0.5]),
        judged(3, [1.0, 1.0], advantages=[0.0, 0.0], verdict="zero_variance"),
        judged(4, [1.0, 1.0]),
        judged(9, [1.0, 1.0]),
    )
    b = revision(
        "b",
        judged(1, [1.0, 0.0], advantages=[0.5, -0.5]),
        judged(2, [0.2, 0.4], advantages=[-0.1, 0.1]),
        judged(3, [0.0, 1.0], advantages=[-0.5, 0.5]),
        judged(4, [1.0, 1.0], advantages=[0.0, 0.0], verdict="zero_variance"),
        unscored=2,
    )
    found = compare("r", a, b)
    metrics = found.metrics
    assert tuple(metrics) == tuple(METRICS)
    assert metrics["sign_flips"] == 1 / 2  # groups 1 and 2 are trainable in both
    assert metrics["verdict_changes"] == 1 / 4
    assert (metrics["only_a"], metrics["only_b"], metrics["unscored_b"]) == (1, 0, 2)
    assert (metrics["zero_variance_a"], metrics["zero_variance_b"]) == (1 / 3, 1 / 4)
    assert metrics["alpha_a"] is None
    assert found.a.seconds == 2.5
    assert [(one.seq, one.gap) for one in found.disputed] == [(1, 1.0), (3, 0.5), (2, 0.4)]
    assert compare("r", a, b, disputed=1).disputed == found.disputed[:1]


def test_revisions_without_a_group_in_common_leave_everything_undefined():
    metrics = compare("r", revision("a", judged(1, [0.0, 1.0])), revision("b", judged(2, [0.0, 1.0]))).metrics
    assert all(metrics[name] is None for name in ("sign_flips", "verdict_changes", "rank_correlation", "mean_shift"))
    said = parse_condition("sign_flips > 0.05", METRICS).failure(metrics)
    assert "undefined" in said


def test_one_undefined_environment_makes_the_lowest_correlation_undefined():
    groups = judged(1, [0.0, 1.0]), judged(2, [1.0, 1.0], env="words")
    assert compare("r", revision("a", *groups), revision("b", *groups)).metrics["rank_correlation"] is None


@pytest.fixture
def gamed():
    """Live: one rater, which pays for length. Again: the same with three raters that judge the answer."""
    draw = np.random.default_rng(3)
    live, again = [], []
    for n in range(1, 200):
        truth, lengths = draw.uniform(size=4), draw.integers(1, 100, 4)
        honest = {f"honest{i}": np.clip(truth + draw.normal(0, 0.1, 4), 0, 1).tolist() for i in range(3)}
        bribed = (lengths / 100).tolist()
        ratings = {**honest, "bribed": bribed}
        mean = np.mean(list(ratings.values()), axis=0).tolist()
        for kept, scores, known in ((live, bribed, {"bribed": bribed}), (again, mean, ratings)):
            centred = (np.array(scores) - np.mean(scores)).tolist()
            kept.append(judged(n, scores, ratings=known, advantages=centred, lengths=lengths.tolist()))
    return compare("r", revision("live", *live), revision("again", *again))


def test_a_rater_that_games_the_score_is_found_where_the_live_score_missed_it(gamed):
    assert gamed.metrics["alpha_a"] is None  # one rater has no other to agree with
    assert gamed.metrics["at_odds_a"] == 0
    assert [rater.rater for rater in gamed.b.raters if rater.at_odds] == ["bribed"]
    (bribed,) = (rater for rater in gamed.b.raters if rater.at_odds)
    assert bribed.alpha_without > 0.8 > gamed.b.alpha
    assert bribed.length > 0.9
    assert bribed.length_bias > 0.9
    honest = [rater.length_bias for rater in gamed.b.raters if rater.rater != "bribed"]
    assert all(abs(bias) < 0.35 for bias in honest), honest
    assert gamed.metrics["sign_flips"] > 0.5
    assert gamed.metrics["rank_within"] < 0.6


def test_few_groups_have_no_interval_which_is_said_and_is_not_that_no_rater_is_at_odds():
    draw = np.random.default_rng(4)
    few = []
    for n in range(1, 20):
        truth = draw.uniform(size=64)
        ratings = {name: np.clip(truth + draw.normal(0, 0.1, 64), 0, 1).tolist() for name in "abc"}
        few.append(judged(n, [0.0] * 64, ratings={**ratings, "odd": draw.uniform(size=64).tolist()}))
    found = compare("r", revision("a", *few), revision("b", judged(99, [0.5], ratings={"a": [0.5]})))
    assert found.a.alpha is not None
    assert found.a.alpha_interval is None
    assert {rater.rater: rater.at_odds for rater in found.a.raters} == {"a": False, "b": False, "c": False, "odd": None}
    assert found.metrics["at_odds_a"] is None
    assert "undefined" in parse_condition("at_odds_a > 0", METRICS).failure(found.metrics)
    assert found.metrics["at_odds_b"] == 0  # one rater has no other to be at odds with
    text = markdown(report(found, []))
    assert "(no interval)" in text
    assert "an interval takes 20 groups" in text


def test_the_interval_in_a_comparison_is_that_over_groups(gamed):
    assert gamed.b.alpha_interval.groups == 199
    assert gamed.b.alpha_interval.low < gamed.b.alpha < gamed.b.alpha_interval.high


def test_every_form_of_the_report_tells_of_it_and_no_text_of_a_rollout_breaks_out(gamed):
    evil = [
        Message(role="user", content="```\n</pre><script>alert(1)</script>\x1b[2J"),
        Message(role="assistant", content="a"),
    ]
    shown = report(gamed, [evil] * 4 + [None])
    text, site = markdown(shown), page(shown, gamed)
    for form in (text, site):
        assert "rater bribed of again is at odds" in form
        assert "\x1b" not in form
    assert "````\n```\n" in text
    assert "<script" not in site
    assert site.count("<svg") == 1
    assert "its rollout was trimmed" in site
    assert page(shown, gamed) == site
    assert 'src="' not in site
    assert 'href="http' not in site


@pytest.mark.parametrize(
    ("text", "value", "fails"),
    [("sign_flips>0.05", 0.06, True), (" sign_flips <= 5e-2 ", 0.05, True), ("sign_flips>=.5", 0.4, False),
     ("sign_flips!=0", 0.0, False), ("sign_flips==0", 0.0, True), ("sign_flips<-1", 0.0, False)],
)  # fmt: skip
def test_conditions_hold_or_not(text, value, fails):
    assert (parse_condition(text, METRICS).failure({"sign_flips": value}) is not None) is fails


@pytest.mark.parametrize(
    "text", ["", "sign_flips", "sign_flips>", "sign_flips>0.05 or 1", "0.05<sign_flips", "sign_flips>nan",
             "sign_flips>1e9999", "__import__('os')>0", "sign_flips>0x10", "sign_flips=0", "sign_flips>1_0"],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match="METRIC OP NUMBER"):
        parse_condition(text, METRICS)


def test_an_unknown_metric_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="no metric 'flips'; there are sign_flips"):
        parse_condition("flips>0", METRICS)


def test_a_group_whose_reward_is_of_other_samples_is_compared_with_none():
    """As where one id was given to two rollouts."""
    whole = judged(1, [0.0, 1.0], advantages=[-0.5, 0.5])
    mixed = ComparedGroup("sums", whole.score, judged(1, [0.0, 1.0, 1.0], advantages=[-1.0, 0.5, 0.5]).reward)
    found = compare("r", revision("live", whole), revision("b", mixed))
    assert (found.envs, found.metrics["only_a"], found.metrics["only_b"]) == ([], 1, 1)
