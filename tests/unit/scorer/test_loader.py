"""Loading raters, and the judgement of what they return."""

import sys
import types

import numpy as np
import pytest

from lachesis.pipeline.scorer.config import RaterConfig
from lachesis.pipeline.scorer.loader import load_member, load_members
from lachesis.pipeline.scorer.rater import FunctionRater, Rater, Rating, Sample, rater, rating_within, to_rating
from lachesis.schemas.errors import ConfigError

SAMPLE = Sample(prompt="p", completion="c", token_count=7)


@rater(bounds=(0.0, 10.0), version="3")
def tokens(sample, *, factor=1.0):
    """Count."""
    return factor * sample.token_count


@rater
def unbounded(sample):
    return 1.0


class Counting(Rater):
    version = "2"
    bounds = (0.0, 1.0)

    def __init__(self, limit=1):
        self.limit = limit

    def rate(self, sample):
        return min(1.0, sample.token_count / self.limit)


@pytest.fixture(autouse=True)
def module(monkeypatch):
    made = types.ModuleType("my_raters")
    made.__dict__.update(tokens=tokens, unbounded=unbounded, Counting=Counting, ready=Counting(14), plain=lambda s: 0.5)
    made.constant = 3
    monkeypatch.setitem(sys.modules, "my_raters", made)


def load(which, **config):
    return load_member(RaterConfig(rater=f"my_raters:{which}", **config))


def test_a_decorated_function_stays_a_function_and_becomes_a_rater():
    assert isinstance(tokens, FunctionRater)
    assert tokens(SAMPLE, factor=2.0) == 14.0
    member = load("tokens", params={"factor": 3.0})
    assert (member.name, member.bounds, member.rater.version) == ("tokens", (0.0, 10.0), "3")
    assert member.rater.rate(SAMPLE) == 21.0
    assert tokens.rate(SAMPLE) == 7.0, "binding parameters leaves the original alone"


def test_classes_objects_and_plain_functions_load():
    assert load("Counting", params={"limit": 7}).rater.rate(SAMPLE) == 1.0
    assert load("ready", name="half").name == "half"
    assert load("ready").rater.rate(SAMPLE) == 0.5
    assert load("plain", bounds=(0.0, 1.0)).rater.rate(SAMPLE) == 0.5


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"rater": "exact_mach"}, "rater 'exact_mach' is neither .*; did you mean 'exact_match'"),
        ({"rater": "no_such_module:x"}, "module 'no_such_module' was not found"),
        ({"rater": "my_raters:nothing"}, "has no 'nothing'"),
        ({"rater": "my_raters:constant"}, "is a int; give a function or a Rater"),
        ({"rater": "my_raters:tokens", "params": {"fctor": 1}}, "params.*fctor"),
        ({"rater": "my_raters:Counting", "params": {"lim": 1}}, "params.*lim"),
        ({"rater": "my_raters:ready", "params": {"limit": 1}}, "takes no params"),
        ({"rater": "my_raters:unbounded"}, "has no bounds.*calibration pass"),
        ({"rater": "my_raters:tokens", "bounds": (0.0, 1.0)}, "declares bounds"),
        ({"rater": "my_raters:unbounded", "bounds": (1.0, 1.0)}, "lower one first"),
        ({"rater": "my_raters:unbounded", "bounds": (0.0, float("inf"))}, "two finite numbers"),
    ],
)
def test_errors_say_what_to_change(config, says):
    with pytest.raises(ConfigError, match=says):
        load_member(RaterConfig(**config))


def test_two_raters_of_one_name_are_refused():
    twice = RaterConfig(rater="my_raters:tokens")
    with pytest.raises(ConfigError, match="give one of them a `name`"):
        load_members([twice, twice])


def test_bounds_are_checked_where_they_are_declared():
    with pytest.raises(ConfigError, match="lower one first"):
        rater(bounds=(1.0, 0.0))


@pytest.mark.parametrize("setting", [{"timeout_s": 0.0}, {"concurrency": 0}, {"retries": -1}, {"weight": 0.0}])
def test_wrong_settings_name_themselves(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        RaterConfig(rater="exact_match", **setting)


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, "abstain"), (float("nan"), "nonfinite"), (float("-inf"), "nonfinite"), ("0.5", "error"), (b"1", "error"),
     ([0.5], "error"), ({}, "error"), (1j, "error"), (10**400, "error"), (np.array([1.0, 2.0]), "error"),
     (1.1, "error"), (-0.1, "error"), (np.float64("nan"), "nonfinite")],
)  # fmt: skip
def test_what_is_no_rating_is_missing_with_its_reason(value, status):
    rating = to_rating(value, (0.0, 1.0))
    assert rating.value is None
    assert rating.status == status
    assert rating.detail or status == "abstain"


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (0, 0.0), (np.float32(0.5), 0.5), (np.array(0.25), 0.25), (1 + 1e-9, 1.0), (np.bool_(False), 0.0)],
)
def test_numbers_of_any_kind_are_ratings(value, number):
    assert to_rating(value, (0.0, 1.0)) == rating_within((0.0, 1.0))(value) == Rating(number)
