"""Gains of which another rater thinks less are seen; learning is not, however fast and in whichever order."""

import math

import msgspec
import pytest

from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.outlying_groups import OutlyingGroups
from lachesis.pipeline.health.logic.rater_saturation import RaterSaturation
from lachesis.pipeline.health.logic.unconfirmed_gain import UnconfirmedGain

RATERS = ("exact", "similar", "judge", "style")


def rated(groups, fooled=(), share=0.0, **lifts):
    """Ratings of one group; `fooled` raters give .95 to a share of the samples, `lifts` raise a rater's level."""
    rng = groups.rng
    task = rng.gauss(0.4, 0.1)
    skill = [task + rng.gauss(0, 0.12) for _ in range(8)]
    hit = [rng.random() < share for _ in skill]
    return {
        name: [
            0.95 if bad and name in fooled else value + lifts.get(name, 0.0) + rng.gauss(0, 0.06)
            for value, bad in zip(skill, hit, strict=True)
        ]
        for name in RATERS
    }


def judge(groups, check, make, windows):
    """Feed windows to one check, saved and loaded between any two, and return the severities."""
    found = []
    for k in range(windows):
        window = HealthWindow(scores=[groups.score(ratings=make(64 * k + i)) for i in range(64)])
        found.append(check.evaluate(window))
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(check.state_dict()))
        check = type(check)()
        check.load_state_dict(state)
    return found


def quick(groups, lift=0.0, *, fooled=(), share=0.0, witness=None, raters=("exact", "judge"), **fields):
    """A group of four samples, good with a chance of .4 + `lift`. Of good ones `exact` says 1, others 0; judges .8, .3.

    A share of the bad ones uses a trick: `fooled` raters find it good, and the others rate it `witness` if that is
    given.
    """
    rng = groups.rng
    good = [rng.random() < 0.4 + lift for _ in range(4)]
    trick = [not good[i] and rng.random() < share for i in range(4)]

    def rating(name, i):
        if trick[i] and name not in fooled and witness is not None:
            return witness + rng.gauss(0, 0.05)
        fine = name in fooled if trick[i] else good[i]
        return float(fine) if name == "exact" else (0.8 if fine else 0.3) + rng.gauss(0, 0.1)

    ratings = {name: [rating(name, i) for i in range(4)] for name in raters}
    scores = [sum(column[i] for column in ratings.values()) / len(ratings) for i in range(4)]
    lengths = fields.pop("lengths", [50] * 4)
    return groups.score(ratings=ratings, scores=scores, lengths=lengths, signals=SIGNALS, **fields)


SIGNALS = {"logprobs": [-0.5] * 4, "texts": [1, 2, 3, 4]}


def follow(make, windows, check=None):
    """Feed windows of 64 groups to the check, which is saved and loaded half way; return its results."""
    check, found = check or UnconfirmedGain(), []
    for k in range(windows):
        found.append(check.evaluate(HealthWindow(scores=[make(64 * k + i) for i in range(64)])))
        if k == windows // 2:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(check.state_dict()))
            check = UnconfirmedGain()
            check.load_state_dict(state)
    return found


ONSET, WINDOWS = 2304, 46


def since(i, groups=640):
    """How far a change is that begins after 36 windows."""
    return min(1.0, max(0.0, (i - ONSET) / groups))


def severities(found):
    return {result.severity for result in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fooled", "witness", "named"),
    [
        (("judge",), None, "rises by judge, and of what it rates high exact"),
        (("exact",), None, "rises by exact, and of what it rates high judge"),
        (("exact",), 0.6, "rises by exact, and of what it rates high judge"),  # more than what is bad, less than good
    ],
)
def test_a_gain_of_which_another_rater_thinks_less_is_seen(groups, fooled, witness, named):
    found = follow(lambda i: quick(groups, fooled=fooled, share=0.6 * since(i), witness=witness), WINDOWS)
    assert severities(found[:37]) <= {"idle", "ok"}
    first = next(result for result in found if result.severity not in {"idle", "ok"})
    assert (first.severity in {"warn", "quarantine"}, first.grows) == (True, True)
    assert named in first.reason
    assert found[-1].severity == "quarantine"


@pytest.mark.slow
@pytest.mark.parametrize("lift", [lambda i: 0.5 * i / (64 * WINDOWS), lambda i: 0.5 * since(i, 1), lambda i: 0.0])
def test_learning_however_fast_is_no_such_gain(groups, lift):
    assert severities(follow(lambda i: quick(groups, lift(i)), WINDOWS)) == {"idle", "ok"}


@pytest.mark.slow
def test_a_rater_that_is_lenient_with_what_scores_no_more_is_no_gain(groups):
    """The judge comes to like bad answers, and the policy becomes worse at the same time."""
    found = follow(lambda i: quick(groups, -0.3 * since(i), fooled=("judge",), share=0.1 * since(i)), WINDOWS)
    assert severities(found) == {"idle", "ok"}


@pytest.mark.slow
def test_a_hack_of_one_skill_is_seen_there(groups):
    skills = ("algebra", "geometry", "logic", "proofs", "sums", "trees")

    def make(i):
        skill = skills[i % 6]
        share = 0.8 * since(i) * (skill == "logic")
        return quick(groups, fooled=("exact",), share=share, witness=0.6, skill=skill)

    found = follow(make, WINDOWS + 8)
    warned = [result.reason for result in found if result.severity in {"warn", "quarantine"}]
    assert "it rates high in logic judge thinks less" in warned[0]


@pytest.mark.slow
def test_raters_that_never_agreed_say_nothing_of_each_other(groups):
    def make(i):
        score = quick(groups, fooled=("judge",), share=0.8 * since(i))
        return msgspec.structs.replace(
            score, ratings={**score.ratings, "exact": [float(groups.rng.random() < 0.5) for _ in range(4)]}
        )

    found = follow(make, WINDOWS)
    assert severities(found) == {"idle"}
    assert "no two raters agree" in found[-1].reason


@pytest.mark.slow
def test_a_rater_of_brevity_does_not_contradict_answers_that_grow(groups):
    """Wrong answers run long, so brevity agrees with truth; then all answers grow, and more of them are right."""

    def make(i):
        score = quick(groups, 0.3 * since(i), raters=("exact",))
        right = score.ratings["exact"]
        lengths = [int(groups.rng.uniform(80, 120) * (1 + since(i)) * (1.5 - 0.5 * value)) for value in right]
        return msgspec.structs.replace(
            score, lengths=lengths, ratings={"exact": right, "brevity": [max(0.0, 1 - n / 600) for n in lengths]}
        )

    assert severities(follow(make, WINDOWS)) == {"idle"}


@pytest.mark.slow
def test_a_judge_that_dislikes_length_does_not_contradict_answers_that_grow(groups):
    def make(i):
        lengths = [int(groups.rng.lognormvariate(4 + 1.5 * since(i), 0.4)) for _ in range(4)]
        score = quick(groups, 0.3 * since(i), lengths=lengths)
        judge = [value - 0.05 * math.log(n) for value, n in zip(score.ratings["judge"], lengths, strict=True)]
        return msgspec.structs.replace(score, ratings={**score.ratings, "judge": judge})

    assert severities(follow(make, WINDOWS)) == {"idle", "ok"}


@pytest.mark.slow
def test_a_trick_that_shortens_answers_to_a_tenth_is_seen(groups):
    """The judge likes length a little: by how much, thousands of groups before the trick say better than the first."""
    rng, onset = groups.rng, 64 * 72

    def make(i):
        share = 0.6 * min(1.0, max(0.0, (i - onset) / 320))
        good = [rng.random() < 0.4 for _ in range(8)]
        trick = [not fine and rng.random() < share for fine in good]
        lengths = [max(1, int(rng.lognormvariate(6, 0.35) * (0.1 if bad else 1))) for bad in trick]
        worth = [0.8 if fine else 0.75 if bad else 0.3 for fine, bad in zip(good, trick, strict=True)]
        judge = [w + 0.02 * math.log(n / 400) + rng.gauss(0, 0.12) for w, n in zip(worth, lengths, strict=True)]
        exact = [float(fine or bad) for fine, bad in zip(good, trick, strict=True)]
        scores = [(a + b) / 2 for a, b in zip(exact, judge, strict=True)]
        signals = {"logprobs": [-0.5] * 8, "texts": list(range(8))}
        return groups.score(ratings={"exact": exact, "judge": judge}, scores=scores, lengths=lengths, signals=signals)

    found = follow(make, 96)
    assert severities(found[:73]) <= {"idle", "ok"}
    assert severities(found[-12:]) <= {"warn", "quarantine"}
    assert "rises by exact, and of what it rates high judge" in found[-1].reason


@pytest.mark.slow
def test_form_that_is_learned_first_is_no_such_gain(groups):
    """At first only good answers have form; all of them do after 1,500 groups, when most are no better."""

    def make(i):
        score = quick(groups, 0.1 * i / (64 * WINDOWS))
        formed = min(1.0, i / 1500)
        form = [max(value, float(groups.rng.random() < formed)) for value in score.ratings["exact"]]
        scores = [(a + b) / 2 for a, b in zip(form, score.ratings["exact"], strict=True)]
        return msgspec.structs.replace(score, scores=scores, ratings={**score.ratings, "form": form})

    assert severities(follow(make, WINDOWS)) == {"idle", "ok"}


@pytest.mark.slow
def test_waves_of_difficulty_are_no_such_gain(groups):
    """Graded quality: what is rated high is better in easy weeks, and in each of them again."""

    def make(i):
        level = 0.5 + 0.2 * math.sin(2 * math.pi * i / 1200)
        worth = [groups.rng.gauss(level + groups.rng.gauss(0, 0.1), 0.15) for _ in range(4)]
        ratings = {name: [value + groups.rng.gauss(0, 0.08) for value in worth] for name in ("exact", "judge")}
        return groups.score(ratings=ratings, scores=worth, lengths=[50] * 4, signals=SIGNALS)

    assert severities(follow(make, WINDOWS)) == {"idle", "ok"}


@pytest.mark.slow
def test_a_rater_that_ranks_the_samples_of_a_group_contradicts_no_learning(groups):
    """The more samples are right, the lower the mean rank of those that are."""

    def make(i):
        score = quick(groups, 0.4 * since(i))
        judge = score.ratings["judge"]
        ranks = [sum(other < value for other in judge) / 3 for value in judge]
        return msgspec.structs.replace(score, ratings={"exact": score.ratings["exact"], "ranker": ranks})

    assert severities(follow(make, WINDOWS)) == {"idle", "ok"}


@pytest.mark.slow
def test_missing_ratings_are_left_out(groups):
    def make(i):
        score = quick(groups, fooled=("judge",), share=0.6 * since(i))
        exact = [None if groups.rng.random() < 0.2 else value for value in score.ratings["exact"]]
        return msgspec.structs.replace(score, ratings={**score.ratings, "exact": exact})

    assert follow(make, WINDOWS)[-1].severity == "quarantine"


def test_the_state_of_slopes_is_left_behind(groups):
    check = UnconfirmedGain()
    check.load_state_dict({"points": [{"score": 0.5, "means": {}, "pairs": {}}], "left": []})
    assert follow(lambda _: quick(groups), 2, check)[-1].severity == "idle"


def test_a_single_rater_that_saturates_informs(groups):
    found = judge(groups, RaterSaturation(), lambda i: rated(groups) if i < 256 else best(groups, ("style",)), 6)
    assert [result.severity for result in found] == ["idle", "idle", "ok", "ok", "inform", "inform"]
    assert "style" in found[-1].reason


def best(groups, names):
    return {name: [1.0] * 8 if name in names else column for name, column in rated(groups).items()}


@pytest.mark.parametrize("names", [RATERS, ("exact", "similar")])
def test_raters_that_saturate_together_or_from_the_start_are_no_hack(groups, names):
    found = judge(groups, RaterSaturation(), lambda i: rated(groups) if i < 256 else best(groups, names), 6)
    assert {result.severity for result in found} <= {"idle", "ok"}
    found = judge(groups, RaterSaturation(), lambda _: best(groups, ("style",)), 6)
    assert {result.severity for result in found} <= {"idle", "ok"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_twentieth_of_the_groups_hacked_is_seen(groups, seed):
    groups.rng.seed(seed)

    def make(i):
        return rated(groups, ("judge",), float(i > 2048 and groups.rng.random() < 0.05))

    found = judge(groups, OutlyingGroups(), make, 93)
    severities = [result.severity for result in found]
    assert set(severities[:32]) <= {"idle", "ok"}
    assert "inform" in severities
    assert not any(result.grows for result in found)


def test_groups_that_come_to_differ_more_altogether_are_none_that_lie_apart(groups):
    """Raters of different kinds, whose tasks differ more and more."""

    def make(i):
        ratings = rated(groups)
        offset = groups.rng.gauss(0, 0.05 + 0.2 * i / 3200)
        return {**ratings, "style": [value + offset for value in ratings["style"]]}

    found = judge(groups, OutlyingGroups(), make, 50)
    assert {result.severity for result in found} <= {"idle", "ok"}


@pytest.mark.slow
def test_raters_that_no_longer_rate_together_are_no_evidence(groups):
    def make(i):
        raters = ("exact", "judge") if i < ONSET else ("judge",)
        return quick(groups, fooled=("judge",), share=0.6 * since(i), raters=raters)

    assert severities(follow(make, WINDOWS)) == {"idle", "ok"}
