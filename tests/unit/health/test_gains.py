"""Slow gains of a few raters, saturation and hacks of few groups are seen; learning at different speeds is not."""

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


@pytest.mark.slow
@pytest.mark.parametrize("fooled", [("judge",), ("judge", "style")])
def test_a_gain_over_5000_groups_that_others_do_not_confirm_is_seen(groups, fooled):
    found = judge(groups, UnconfirmedGain(), lambda i: rated(groups, fooled, 0.7 * i / 5000), 78)
    warned = [result for result in found if result.severity == "warn"]
    assert len(warned) > 10
    assert all(name in warned[-1].reason for name in fooled)
    assert warned[-1].grows


@pytest.mark.parametrize(("trend", "grows"), [(0.0, False), (-0.004, True)])
def test_form_that_is_learned_first_only_warns_unless_the_others_fall(groups, trend, grows):
    """Over 1,536 groups form rises, and agrees less with the others on which samples are better."""
    points = [
        {
            "score": [0.4 + 0.01 * k + e],
            "exact": [0.4 + trend * k + e, 0.8 - e],
            "similar": [0.4 + trend * k - e, 0.8 + e],
            "form": [0.2 + 0.02 * k + e, 0.7 - 0.02 * k + e],
        }
        for k, e in enumerate([0.01, -0.01] * 12)
    ]
    check = UnconfirmedGain()
    check.load_state_dict({"points": points, "left": []})
    found = check.evaluate(HealthWindow(scores=[groups.score(ratings=rated(groups))]))
    assert (found.severity, found.grows) == ("warn", grows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lifts",
    [
        {"judge": 0.5},  # learns faster, and keeps agreeing on which samples are better
        {"exact": 0.4, "similar": 0.4, "judge": 0.4, "style": -0.3},  # a rater of brevity, where thinking longer helps
        {"exact": 0.4, "similar": 0.4, "judge": 0.4, "style": 0.4},
        {},
    ],
)
def test_raters_that_keep_agreeing_part_in_health(groups, lifts):
    found = judge(groups, UnconfirmedGain(), lambda i: rated(groups, **{k: v * i / 3200 for k, v in lifts.items()}), 50)
    assert {result.severity for result in found} <= {"idle", "ok"}


@pytest.mark.parametrize(("level", "fall", "severity"), [(0.5, 0.0, "warn"), (0.99, 0.0, "ok"), (0.99, 0.01, "warn")])
def test_a_rater_at_its_best_says_nothing_of_the_gains_of_others(groups, level, fall, severity):
    """It cannot rise; falling, it contradicts them."""
    noise = [0.01, -0.01] * 12
    points = [
        {
            "score": [0.4 + 0.01 * k + e],
            "similar": [0.4 + 0.02 * k + e, 0.8 - 0.02 * k + e],
            "exact": [0.4 + 0.0009 * k + e, 0.8],  # rises, though not for certain: 2 < t < 4
            "form": [level - fall * k + e / 10, 0.1],
        }
        for k, e in enumerate(noise)
    ]
    check = UnconfirmedGain()
    check.load_state_dict({"points": points, "left": []})
    found = check.evaluate(HealthWindow(scores=[groups.score(ratings=rated(groups))]))
    assert found.severity == severity, found


def test_a_single_rater_that_saturates_warns(groups):
    found = judge(groups, RaterSaturation(), lambda i: rated(groups) if i < 256 else best(groups, ("style",)), 6)
    assert [result.severity for result in found] == ["idle", "idle", "ok", "ok", "warn", "warn"]
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
def test_a_twentieth_of_the_groups_hacked_is_warned_of(groups, seed):
    groups.rng.seed(seed)

    def make(i):
        return rated(groups, ("judge",), float(i > 2048 and groups.rng.random() < 0.05))

    found = judge(groups, OutlyingGroups(), make, 93)
    severities = [result.severity for result in found]
    assert set(severities[:32]) <= {"idle", "ok"}
    assert "warn" in severities
    assert not any(result.grows for result in found)


def test_groups_that_come_to_differ_more_altogether_are_none_that_lie_apart(groups):
    """Raters of different kinds, whose tasks differ more and more."""

    def make(i):
        ratings = rated(groups)
        offset = groups.rng.gauss(0, 0.05 + 0.2 * i / 3200)
        return {**ratings, "style": [value + offset for value in ratings["style"]]}

    found = judge(groups, OutlyingGroups(), make, 50)
    assert {result.severity for result in found} <= {"idle", "ok"}
