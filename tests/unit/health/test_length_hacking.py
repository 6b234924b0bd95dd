"""Length: longer answers that score more are seen, wrong answers that run long are ordinary."""

import msgspec
import numpy as np
import pytest

from lachesis.pipeline.health.logic.check import HealthWindow
from lachesis.pipeline.health.logic.length_hacking import LengthHacking
from lachesis.schemas.annotations import GroupScore


def window(rng, slope, *, groups=64, samples=8, scale=1.0, base=4.0, copies=1, binary=False):
    """Groups in which the logarithm of the length moves by `slope` with a deviation of the score."""
    found = []
    for _ in range(groups):
        score = rng.normal(0, 1, samples)
        unit = score
        if binary:
            score = (score > 0).astype(float)
            unit = 2 * score - 1
        lengths = np.exp(base + 0.5 * (slope * unit + rng.normal(size=samples))).astype(int) + 1
        found.append(
            GroupScore(
                group="g",
                seq=1,
                item="",
                policy_step=0,
                ratings={},
                scores=np.tile(scale * score, copies).tolist(),
                lengths=np.tile(lengths, copies).tolist(),
            )
        )
    return HealthWindow(scores=found)


def judge(slopes, seed=0, check=None, **shape):
    rng, check = np.random.default_rng(seed), check or LengthHacking()
    return [check.evaluate(window(rng, slope, **shape)) for slope in slopes]


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("samples", [2, 8, 16])
@pytest.mark.parametrize("slope", [-0.7, -1.5])
def test_wrong_answers_that_run_long_are_ordinary(binary, samples, slope):
    results = judge([slope] * 30, samples=samples, binary=binary)
    assert {result.severity for result in results} == {"ok"}
    assert max(result.value for result in results) < 0


@pytest.mark.parametrize("samples", [2, 8, 16])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_longer_answers_that_score_more_inform_at_once(samples, scale):
    (result,) = judge([1.0], samples=samples, scale=scale)
    assert result.severity == "inform"
    assert result.reason.startswith("longer answers score more")
    assert result.examples


def test_they_quarantine_where_answers_grow():
    rng, check = np.random.default_rng(0), LengthHacking()
    found = [check.evaluate(window(rng, 2.0, base=4.0 + 0.2 * i)).severity for i in range(8)]
    assert found[0] == "inform"
    assert found[-1] == "quarantine"


@pytest.mark.parametrize(
    ("first", "growth", "severity"), [(0.0, 0.2, "warn"), (0.6, 0.2, "inform"), (0.0, -0.1, "inform")]
)
def test_they_warn_where_they_come_to_score_more_and_answers_grow(first, growth, severity):
    rng, check = np.random.default_rng(0), LengthHacking()
    slopes = [first] * 2 + [0.6] * 6
    found = [check.evaluate(window(rng, slope, base=4.0 + growth * i)) for i, slope in enumerate(slopes)]
    assert found[-1].severity == severity


@pytest.mark.parametrize(("follow", "severity"), [(0, "quarantine"), (1, "quarantine"), (2, "inform"), (3, "inform")])
def test_they_only_inform_where_most_raters_find_longer_answers_better(follow, severity):
    rng, check = np.random.default_rng(0), LengthHacking()
    for i in range(8):
        shown = window(rng, 2.0, base=4.0 + 0.2 * i)
        for score in shown.scores:
            score.ratings.update({f"r{k}": score.scores if k < follow else rng.random(8).tolist() for k in range(3)})
        found = check.evaluate(shown)
    assert found.severity == severity


@pytest.mark.parametrize(("growth", "severity"), [(0.0, "inform"), (-0.2, "warn")])
def test_shorter_answers_that_score_more_than_at_first_warn_where_answers_shrink(growth, severity):
    rng, check, slopes = np.random.default_rng(0), LengthHacking(), [-0.2] * 4 + [-2.0] * 2
    results = [check.evaluate(window(rng, slope, base=5.0 + growth * i)) for i, slope in enumerate(slopes)]
    assert [result.severity for result in results] == ["ok"] * 4 + [severity] * 2
    assert results[-1].reason.startswith("shorter answers score more")
    assert results[-1].value > results[-1].threshold == 0.3


def test_a_relation_that_ends_is_no_hack():
    assert [result.severity for result in judge([0.4] * 3 + [0.0] * 3)][3:] == ["ok"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("groups", [16, 64])
@pytest.mark.parametrize("samples", [2, 4, 8])
def test_chance_is_ruled_out_though_samples_of_a_group_depend_on_each_other(groups, samples):
    """Every answer three times: a third of the samples say as much."""
    results = judge([0.0] * 400, groups=groups, samples=samples, copies=3)
    assert sum(result.severity != "ok" for result in results) <= 3


def test_eight_groups_are_enough_and_seven_are_not():
    assert judge([2.0], groups=8)[0].severity == "inform"
    assert judge([2.0], groups=7)[0].severity == "idle"


@pytest.mark.parametrize("lengths", [[5] * 8, [3, 9] * 4])
def test_what_does_not_differ_says_nothing(lengths):
    scores = [1.0] * 8 if len(set(lengths)) > 1 else [0.0, 1.0] * 4
    score = GroupScore(group="g", seq=1, item="", policy_step=0, scores=scores, ratings={}, lengths=lengths)
    assert LengthHacking().evaluate(HealthWindow(scores=[score] * 64)).severity == "idle"


def test_a_restart_changes_nothing():
    calm, wild = LengthHacking(), LengthHacking()
    for i, slope in enumerate([-0.3, -0.2, 0.0, 2.0, -2.0, -2.0]):
        shown = window(np.random.default_rng(i), slope)
        assert wild.evaluate(shown) == calm.evaluate(shown)
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(wild.state_dict()))
        wild = LengthHacking()
        wild.load_state_dict(state)
    earlier = LengthHacking()
    earlier.load_state_dict({"lengths": [50.0, 51.0]})  # a state of a build that had no baseline
    assert earlier.state_dict() == {"lengths": [50.0, 51.0], "start": []}
