"""Whether a difference between two revisions matters, by cases whose answer is known."""

import msgspec
import pytest
from unit.offline.compare.test_logic import judged, revision

from lachesis.pipeline.offline.compare.logic import ComparedGroup, ComparedRevision, ScoreSource, compare
from lachesis.pipeline.offline.compare.significance import mean_interval, share_interval
from lachesis.schemas.annotations import GroupReward
from lachesis.services.observe.comparison import report
from lachesis.services.observe.comparison_page import markdown, page

LIVE = ScoreSource("e1", (("length", "1"),))
LATER = ScoreSource("e2", (("length", "2"),))
PROMOTED = ScoreSource("e3", (("median", "1"),), 31)


def both(n: int, *, changed: int, scores: float = 0.0) -> tuple[ComparedRevision, ComparedRevision]:
    """Return two revisions of `n` groups; `changed` are pushed the other way in the second, whose scores are higher."""
    a = [judged(i, [0.0, 1.0], advantages=[-0.5, 0.5]) for i in range(1, n + 1)]
    b = [
        judged(i, [scores, 1.0 + scores], advantages=[0.5, -0.5] if i <= changed else [-0.5, 0.5])
        for i in range(1, n + 1)
    ]
    return revision("live", *a), revision("again", *b)


@pytest.mark.parametrize(
    ("n", "changed", "matters", "said"),
    [
        (200, 60, True, "The difference matters: 60 of 200 groups would be trained on otherwise (24.1% to 36.7%"),
        (200, 1, False, "The difference hardly matters for training: 1 of 200 groups"),
        (10, 1, None, "It is unknown whether the difference matters from 10 groups: 1 of 10 groups"),
    ],
)
def test_it_matters_if_enough_groups_would_be_trained_on_otherwise(
    n: int, changed: int, matters: bool | None, said: str
) -> None:
    found = compare("r", *both(n, changed=changed)).significance
    assert (found.matters, found.changed, found.flipped, found.verdicts) == (matters, changed, changed, 0)
    assert said in found.sentence


def test_scores_that_all_rise_alike_hardly_matter_and_the_shift_is_told() -> None:
    found = compare("r", *both(200, changed=0, scores=0.25)).significance
    assert found.matters is False
    assert found.shift == (0.25, 0.25, 0.25)
    assert "the mean score moves by +0.25 (+0.25 to +0.25)" in found.sentence


def test_a_verdict_counts_as_well_and_equal_revisions_are_said_to_be_equal() -> None:
    a = revision("a", *(judged(i, [0.0, 1.0], advantages=[-0.5, 0.5]) for i in range(1, 51)))
    b = revision("b", *(judged(i, [1.0, 1.0], advantages=[0, 0], verdict="zero_variance") for i in range(1, 51)))
    assert compare("r", a, b).significance.verdicts == 50
    assert compare("r", a, b).significance.matters is True
    same = compare("r", a, a).significance
    assert same.matters is False
    assert same.sentence.startswith("There is no difference: in all of 50 groups")
    without = revision("c", judged(1, [0.0, 1.0]))
    assert "no group has a reward in both" in compare("r", without, without).significance.sentence


def test_intervals_against_worked_cases() -> None:
    assert share_interval(0, 0) == (0.0, 1.0)
    assert share_interval(0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)  # Wilson, by hand
    assert share_interval(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert mean_interval([1.0]) is None
    assert mean_interval([0.0, 2.0]) == pytest.approx((1.0, 1 - 1.96, 1 + 1.96))


def made(n: int, by: ScoreSource, scores: list[float], env: str = "sums") -> ComparedGroup:
    one = judged(n, scores, advantages=[-0.5, 0.5], env=env, ratings={"r": scores})
    return ComparedGroup(one.env, one.score, one.reward, by)


@pytest.mark.slow
def test_a_revision_whose_raters_were_changed_is_compared_part_by_part() -> None:
    live = [made(i, LIVE if i < 11 else LATER if i < 31 else PROMOTED, [0.0, 0.1 * (i // 10)]) for i in range(1, 41)]
    live += [made(i, LIVE, [0.0, 1.0], env="words") for i in range(41, 51)]
    a = ComparedRevision("live", {one.score.group: one for one in live}, 0, complete=True, promotions={31: "median"})
    again = [made(one.score.seq, PROMOTED, [0.5, 0.6], env=one.env) for one in live]
    found = compare("r", a, ComparedRevision("again", {one.score.group: one for one in again}, 0, complete=True))

    assert [(part.name, part.env, part.first, part.last, part.promoted) for part in found.parts] == [
        ("live/1", "sums", 1, 10, None),
        ("live/2", "sums", 11, 30, None),
        ("live/3", "sums", 31, 40, "median"),
    ]
    assert found.parts[1].raters == {"length": "2"}
    assert found.parts[2].figures.groups == 10
    rows = [(one.env, one.a, one.b, one.groups) for one in found.envs]
    assert rows == [("sums", f"live/{n}", "again", count) for n, count in ((1, 10), (2, 20), (3, 10))] + [
        ("words", "live", "again", 10)
    ]
    shown = report(found, [None] * len(found.disputed))
    for form in (markdown(shown), page(shown, found)):
        assert "the scoring of live was changed, so its 3 parts are compared apart" in form
        for part, groups in ((1, 10), (2, 20), (3, 10)):
            assert f"sums (live/{part}): It is unknown whether the difference matters from {groups} groups" in form
        assert "promotion of median" in form
        assert "sums (live/2)" in form
    assert page(shown, found).count("<svg") == 4


def test_a_revision_of_one_part_has_no_parts() -> None:
    assert compare("r", *both(3, changed=0)).parts == []


def test_the_plot_is_of_scores_which_a_warm_up_leaves_alone() -> None:
    a, b = both(4, changed=0, scores=0.5)
    (env,) = compare("r", a, b).envs
    assert (env.edges[0], env.edges[-1]) == (0.0, 1.5)
    assert sum(env.counts_a) == sum(env.counts_b) == 8
    shifted = {name: ComparedGroup(one.env, one.score, _rewarded(one, 100.0)) for name, one in b.groups.items()}
    (env,) = compare("r", a, ComparedRevision("again", shifted, 0, complete=True)).envs
    assert env.edges[-1] == 1.5, "rewards are on another scale before and after the warm-up"


def _rewarded(one: ComparedGroup, shift: float) -> GroupReward:
    assert one.reward is not None
    return msgspec.structs.replace(one.reward, rewards=[x + shift for x in one.reward.rewards if x is not None])


def test_each_raters_rating_of_a_disputed_sample_is_shown() -> None:
    a = revision("live", judged(1, [0.0, 1.0], ratings={"accuracy": [0.0, 1.0], "form": [0.5, None]}))
    b = revision("again", judged(1, [0.0, 0.2], ratings={"accuracy": [0.0, 0.2]}))
    found = compare("r", a, b)
    (one,) = found.disputed
    assert (one.ratings_a, one.ratings_b) == ({"accuracy": 1.0, "form": None}, {"accuracy": 0.2})
    (text,) = report(found, [None]).texts
    assert ("rated by live", "accuracy 1, form -") in text.lines
    assert ("rated by again", "accuracy 0.2") in text.lines
