"""Raters that change are named by fixed samples, whatever the policy does; noisy ones that stay as they are not."""

import random

import msgspec
import pytest

from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.monitor import EnvMonitor
from lachesis.pipeline.health.logic.rater_drift import RaterDrift
from lachesis.schemas.annotations import FixedRating, GroupScore

SAMPLES = 32
ONSET = 16 * 64
"""Groups after which the rater of a test changes."""


def clipped(value):
    return min(1.0, max(0.0, value))


def honest(noise):
    return lambda rng, good, number, changed: clipped(good + noise * rng.gauss(0, 1))


def milder(rng, good, number, changed):
    return clipped(0.8 * good + 0.1 * rng.gauss(0, 1) + 0.21 * changed)


def reversed_order(rng, good, number, changed):
    return clipped((1 - good if changed else good) + 0.1 * rng.gauss(0, 1))


def scores(rate, *, groups=40 * 64, one_in=8, seed=0, settings=lambda group: "a", first=3):
    """Groups of which the first 32 make a fixed sample each, and one in eight is rated beside one of them."""
    rng = random.Random(seed)
    good = [rng.random() for _ in range(SAMPLES)]
    for group in range(groups):
        own, fixed = 0.1 + 0.8 * group / groups, None  # a policy that learns
        number = group if group < SAMPLES else rng.randrange(SAMPLES)
        if group < SAMPLES or rng.random() < 1 / one_in:
            again = [rate(rng, good[number], number, group >= ONSET) for _ in range(first if group < SAMPLES else 1)]
            own = rate(rng, good[number], number, False) if group < SAMPLES else own
            raters = {"judge": settings(group), "form": "b"}
            ratings = {"judge": again, "form": [1.0] * len(again)}
            fixed = FixedRating(group=f"{number:032x}", sample=1, ratings=ratings, raters=raters)
        yield GroupScore(
            group=f"{group:032x}", seq=group + 1, item="a", policy_step=group // 16, scores=[own] * 2, lengths=[9] * 2,
            ratings={"judge": [0.0, own], "form": [1.0] * 2}, fixed=fixed,
        )  # fmt: skip


def results(found):
    check, window, results = RaterDrift(), HealthWindow(), []
    for score in found:
        window.scores.append(score)
        if len(window.scores) == 64:
            state = msgspec.msgpack.decode(msgspec.msgpack.encode(check.state_dict()))
            check = RaterDrift()
            check.load_state_dict(state)  # as a service that is killed after every window
            results.append(check.evaluate(window))
            window = HealthWindow()
    return results


def severities(found):
    return {one.severity for one in found}


@pytest.mark.slow
def test_a_rater_that_becomes_milder_is_named_with_the_change_and_its_step():
    found = results(scores(milder))
    before, after = found[: ONSET // 64], found[ONSET // 64 :]
    assert severities(before) <= {"idle", "ok"}
    assert next(i for i, one in enumerate(after) if one.severity == "warn") < 6
    last = after[-1]
    assert (last.severity, last.grows) == ("warn", False)
    assert last.reason.startswith("judge rates the same 32 answers 0.")
    assert " higher since about step " in last.reason
    assert "than up to step 1 (chance below 1e-" in last.reason
    assert last.reason.endswith("the rater changed, not the policy")
    since = int(last.reason.partition("about step ")[2].split()[0])
    assert abs(since - ONSET // 16) <= 8
    assert all(example < f"{SAMPLES:032x}" for example in last.examples)


@pytest.mark.slow
def test_a_rater_that_orders_the_samples_otherwise_comes_to_a_quarantine():
    found = results(scores(reversed_order))
    assert severities(found[: ONSET // 64]) <= {"idle", "ok"}
    assert (found[-1].severity, found[-1].grows) == ("warn", True)
    assert "in another order (rank correlation -0." in found[-1].reason
    monitor, standings = EnvMonitor(HealthConfig()), []
    for score in scores(reversed_order):
        monitor.score(score)
        if monitor.window_full:
            monitor.evaluate()
            standings.append((monitor.standing.quarantined_from, monitor.standing.cause))
    assert standings[ONSET // 64 - 1] == (None, None)
    assert standings[-1][0] is not None
    assert standings[-1][1] == "rater_drift"


@pytest.mark.parametrize(
    "rate",
    [
        honest(0.0),
        honest(0.1),
        honest(0.5),
        lambda rng, good, number, changed: float((good > 0.5) != (rng.random() < 0.1)),
        lambda rng, good, number, changed: good if rng.random() < 0.95 else rng.random(),
        lambda rng, good, number, changed: 0.3,
        lambda rng, good, number, changed: rng.random(),
    ],
    ids=["exact", "noisy", "very noisy", "flips one in ten", "random one in twenty", "constant", "noise alone"],
)
def test_an_honest_rater_is_left_alone_however_noisy_it_is(rate):
    assert severities(results(scores(rate, groups=24 * 64, one_in=4))) <= {"idle", "ok"}


def test_a_change_that_no_order_of_the_samples_notices_is_no_warning():
    def requantised(rng, good, number, changed):
        return good + changed * 1e-4 * rng.gauss(0, 1)

    assert severities(results(scores(requantised, groups=24 * 64))) <= {"idle", "ok"}


@pytest.mark.slow
def test_a_rater_that_was_configured_otherwise_begins_again():
    found = results(scores(milder, settings=lambda group: "a" if group < ONSET else "changed"))
    assert severities(found) <= {"idle", "ok"}

    again = results(scores(milder, one_in=2, settings=lambda group: "a" if group < ONSET // 2 else "changed"))
    assert severities(again[: ONSET // 64]) <= {"idle", "ok"}
    assert again[-1].severity == "warn"  # the next two ratings of each sample are what it is compared with


def test_missing_ratings_and_no_samples_are_nothing_to_judge_by():
    def without(score):
        fixed = score.fixed and msgspec.structs.replace(score.fixed, ratings={}, raters={})
        return msgspec.structs.replace(score, fixed=fixed)

    assert severities(results(map(without, scores(milder)))) == {"idle"}
    assert severities(results(scores(milder, groups=64))) == {"idle"}
    nan = float("nan")
    assert severities(results(scores(lambda *_: nan))) <= {"idle", "ok"}


def test_the_state_is_bounded_if_the_samples_are_chosen_again_and_again():
    check = RaterDrift()
    for score in scores(milder, groups=64 * 64, one_in=1):
        other = msgspec.structs.replace(score.fixed, group=score.group)
        check.evaluate(HealthWindow(scores=[msgspec.structs.replace(score, fixed=other)]))
    assert len(msgspec.msgpack.encode(check.state_dict())) < 64 << 10
