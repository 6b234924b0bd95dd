"""Gains that a rater could confirm and does not are seen; learning at different speeds is not."""

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


def history(points, levels, agreement, noise=0.01):
    """State of the check after so many points of 64 groups.

    `levels`: by rater where its mean rating begins and ends. `agreement`: the same by pair of the correlation; a pair
    that is not named does not agree. A rating's deviation within groups is .2.
    """
    found = []
    for k in range(points):
        far, error = k / (points - 1), noise if k % 2 else -noise
        means = {
            name: first + (last - first) * far + error * (-1) ** i
            for i, (name, (first, last)) in enumerate(levels.items())
        }
        pairs = {}
        for x in sorted(levels):
            for y in sorted(levels):
                if x < y:
                    first, last = agreement.get((x, y), (0.0, 0.0))
                    pairs[f"{x} {y}"] = [
                        448,
                        448 * 0.04 * (first + (last - first) * far),
                        448 * 0.04,
                        448 * 0.04,
                        0,
                        0,
                        0,
                    ]
        found.append({"score": sum(means.values()) / len(means), "means": means, "pairs": pairs})
    return {"points": found, "left": []}


def after(groups, *args, **kwargs):
    check = UnconfirmedGain()
    check.load_state_dict(history(*args, **kwargs))
    return check.evaluate(HealthWindow(scores=[groups.score(ratings=rated(groups))]))


PARTING = {("exact", "judge"): (0.7, 0.4)}


def test_a_rater_that_never_agreed_says_nothing_of_a_gain(groups):
    """Answers grow: a judge reads long ones less surely, form was good from the start, and exact confirms in part."""
    agreement = {**PARTING, ("form", "judge"): (0.1, -0.1)}
    levels = {"exact": (0.44, 0.58), "judge": (0.4, 0.6), "form": (0.88, 0.84)}
    assert after(groups, 60, levels, agreement).severity == "ok"


@pytest.mark.parametrize(
    ("exact", "severity"),
    [
        ((0.4, 0.4), "warn"),
        ((0.4, 0.43), "warn"),  # it is learned elsewhere, by less than the gain
        ((0.4, 0.52), "ok"),  # the gain times the slope .7
        ((0.98, 0.99), "ok"),  # there is no room above it
    ],
)
def test_a_rater_confirms_as_much_as_it_could(groups, exact, severity):
    levels = {"exact": exact, "judge": (0.4, 0.6), "form": (0.5, 0.5)}
    assert after(groups, 60, levels, PARTING, noise=0.005).severity == severity


def test_a_noisy_rater_that_does_not_rise_for_certain_refutes_nothing(groups):
    levels = {"exact": (0.4, 0.4), "judge": (0.4, 0.5), "form": (0.5, 0.5)}
    assert after(groups, 24, levels, PARTING, noise=0.2).severity == "ok"


def test_raters_that_keep_agreeing_are_in_no_doubt(groups):
    levels = {"exact": (0.4, 0.4), "judge": (0.4, 0.6), "form": (0.5, 0.5)}
    assert after(groups, 60, levels, {("exact", "judge"): (0.7, 0.6)}).severity == "ok"


@pytest.mark.parametrize(("last", "severity", "grows"), [(0.4, "inform", False), (0.3, "warn", True)])
def test_form_that_is_learned_first_only_informs_unless_the_others_fall(groups, last, severity, grows):
    found = after(groups, 24, {"exact": (0.4, last), "judge": (0.4, 0.7), "similar": (0.4, last)}, PARTING)
    assert (found.severity, found.grows) == (severity, grows)


@pytest.mark.parametrize(("last", "agreed", "severity"), [(0.3, 0.2, "warn"), (0.38, 0.2, "ok"), (0.3, 0.45, "ok")])
def test_of_two_raters_one_that_falls_refutes_the_other_if_hardly_any_agreement_is_left(groups, last, agreed, severity):
    noise = 0.01 if last < 0.35 else 0.05
    found = after(groups, 60, {"exact": (0.4, last), "judge": (0.4, 0.7)}, {("exact", "judge"): (0.7, agreed)}, noise)
    assert found.severity == severity


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


def test_raters_that_no_longer_rate_together_are_no_evidence(groups):
    state = history(60, {"exact": (0.4, 0.4), "judge": (0.4, 0.6), "form": (0.5, 0.5)}, PARTING)
    for point in state["points"][8:]:
        del point["pairs"]["exact judge"]
    check = UnconfirmedGain()
    check.load_state_dict(state)
    assert check.evaluate(HealthWindow(scores=[groups.score(ratings=rated(groups))])).severity == "ok"
