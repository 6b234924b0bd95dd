"""Dawid-Skene: planted accuracies are found, in any order to the bit, and too few raters are refused."""

import math
import random

import pytest

from lachesis.pipeline.scorer.logic.accuracy import rater_accuracies

TRUE = {"a": 0.95, "b": 0.8, "c": 0.7, "d": 0.55}


def drawn(n, seed=0, missing=0.2, base=0.3):
    rng = random.Random(seed)
    samples = []
    for _ in range(n):
        gold = rng.random() < base
        samples.append({r: gold == (rng.random() < p) for r, p in TRUE.items() if rng.random() >= missing})
    return samples


@pytest.mark.slow
def test_planted_accuracies_are_found_without_any_label():
    fitted = rater_accuracies(drawn(4000))
    for rater, truth in TRUE.items():
        assert fitted[rater].accuracy == pytest.approx(truth, abs=0.04)
        assert fitted[rater].weight == pytest.approx(math.log(fitted[rater].accuracy / (1 - fitted[rater].accuracy)))
    assert 2500 < fitted["a"].verdicts < 3500


@pytest.mark.slow
def test_the_better_half_outvotes_a_majority_of_worse_raters():
    samples = drawn(4000, seed=1, missing=0.0)
    fitted = rater_accuracies(samples)
    assert fitted["a"].weight > fitted["c"].weight + fitted["d"].weight


def test_the_order_of_samples_and_raters_changes_no_bit():
    samples = drawn(300)
    rng = random.Random(1)
    shuffled = [dict(rng.sample(sorted(sample.items()), len(sample))) for sample in rng.sample(samples, len(samples))]
    assert rater_accuracies(shuffled) == rater_accuracies(samples)


def test_one_who_always_agrees_is_not_taken_to_be_infallible():
    fitted = rater_accuracies([{"a": True, "b": True, "c": True}] * 10)
    assert {found.accuracy for found in fitted.values()} == {fitted["a"].accuracy}
    assert 0.9 < fitted["a"].accuracy < 1
    assert math.isfinite(fitted["a"].weight)


def test_one_who_says_the_opposite_has_a_weight_below_zero():
    rng = random.Random(2)
    truth = [rng.random() < 0.5 for _ in range(200)]
    fitted = rater_accuracies([{"a": t, "b": t, "c": t, "liar": not t} for t in truth])
    assert fitted["liar"].weight < 0 < fitted["a"].weight


@pytest.mark.parametrize("samples", [[], [{"a": True, "b": False}], [{"a": True}, {"b": True}, {"c": True}]])
def test_fewer_than_three_raters_tell_nothing(samples):
    with pytest.raises(ValueError, match="3 raters or more"):
        rater_accuracies(samples)
