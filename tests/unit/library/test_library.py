"""The parts as a library: a loop of one's own on plain lists, and what they refuse."""

import importlib.util
import json
import random
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import lachesis
from lachesis import (
    CurriculumScheduler,
    HealthChecks,
    PerformanceTracker,
    RewardEnsemble,
    WelfordAccumulator,
    krippendorff_alpha,
)
from lachesis.pipeline.errors import SettingsChangedError
from lachesis.schemas.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]


def example():
    spec = importlib.util.spec_from_file_location("own_loop", ROOT / "tests/examples/own_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_trains_and_its_figures_are_there():
    draws = random.Random(0)
    raters = {name: lambda task, answer: float(answer == task) for name in ("one", "two", "three")}
    found = example().train(40, lambda task: [draws.choice([task, "?"]) for _ in range(4)], raters, ["a", "b", "c"])
    assert found["alpha"] == 1.0
    assert found["api_perf/total_items"] == 160
    assert found["curriculum/observed"] == 40
    assert example().same.value == 1.0


def test_the_other_example_of_the_page_runs():
    page = (ROOT / "pipeline/library/README.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "WelfordAccumulator" in one]
    exec(code, {})  # noqa: S102 - our own page


@pytest.mark.outside
@pytest.mark.extension
def test_every_public_name_is_there():
    assert {getattr(lachesis, name) for name in lachesis.__all__}


def test_an_ensemble_leaves_missing_ratings_out_and_counts_agreement():
    made = RewardEnsemble({"a": (0, 1), "b": (0, 10), "c": (-1, 1)}, aggregation="mean", quorum=2)
    scores = made.score({"a": [1, 0, None], "b": [10, 0, None], "c": [1, None, 1]})
    assert scores.scores == [1.0, 0.0, None]
    assert scores.unscorable == [2]
    assert made.agreement.units == 2
    assert made.agreement.value == 1.0


def test_alpha_is_that_of_the_literature_and_undefined_without_variation():
    # Krippendorff 2011, section C: 4 observers, 12 units, nominal .743, interval .849
    missing = None
    table = {
        "a": [1, 2, 3, 3, 2, 1, 4, 1, 2, missing, missing, missing],
        "b": [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, missing, 3],
        "c": [missing, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, missing],
        "d": [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, missing],
    }
    assert krippendorff_alpha(table, metric="nominal").value == pytest.approx(0.743, abs=1e-3)
    assert krippendorff_alpha(table).value == pytest.approx(0.849, abs=1e-3)
    flat = krippendorff_alpha({"a": [1, 1], "b": [1, 1]})
    assert flat.value is None
    assert flat.reason


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: RewardEnsemble({"a": (0, 1)}, weights={"b": 1.0}), "'b', which is no rater"),
        (lambda: RewardEnsemble({"a": (0, 1)}, nothing=1), "nothing"),
        (lambda: RewardEnsemble({"a": (0, 1)}, aggregation="reliability"), "another rule"),
        (lambda: krippendorff_alpha({"a": [1], "b": [1, 2]}), "different numbers of samples"),
        (lambda: CurriculumScheduler(["a", "a"]), "a name of its own"),
        (lambda: CurriculumScheduler(["a"], difficulty=[1.0, 2.0]), "2 for 1 items"),
        (lambda: CurriculumScheduler(["a"], nothing=1), "nothing"),
        (lambda: HealthChecks(nothing=1), "nothing"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(made, words):
    with pytest.raises((ConfigError, DataError), match=words):
        made()


def test_a_scheduler_goes_on_where_it_was_saved():
    one = CurriculumScheduler(list("abcdef"), seed=3)
    for number in range(20):
        one.update(one.sample()[0], [number % 2, 1], step=number)
    state = json.loads(json.dumps(msgspec.to_builtins(one.state_dict())["rng"]))
    again = CurriculumScheduler(list("abcdef"), seed=4)
    again.load_state_dict(one.state_dict() | {"rng": state})
    assert again.weights() == one.weights()
    assert again.sample(8) == one.sample(8)
    with pytest.raises(DataError, match="not one of the 6 items"):
        one.update("z", [1])
    assert not one.update("a", [None, None]), "answers that nobody could judge teach nothing"


def test_health_checks_say_when_every_score_is_the_same():
    checks = HealthChecks(window=16)
    alerts = [alert for _ in range(64) for alert in checks.add_group([1.0] * 4, lengths=[5] * 4)]
    assert {"saturation", "zero_variance"} <= {alert.check for alert in alerts}
    again = HealthChecks(window=16)
    again.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(checks.state_dict())))
    with pytest.raises(DataError, match="lengths: 1 for 2 scores"):
        checks.add_group([1.0, 0.0], lengths=[1])
    with pytest.raises(DataError, match="score 0 is nan"):
        checks.add_group([float("nan")])


@pytest.mark.parametrize(
    ("scores", "advantages", "expected"),
    [
        ([0.0, 100.0, 0.0, 100.0], None, set()),
        ([0.0, 1.0], [20.0, 30.0], set()),
        ([0.1, 0.1, 0.1], None, {"zero_variance"}),
    ],
    ids=["scores in percent", "advantages of another estimator", "equal scores whose mean is rounded"],
)
def test_health_checks_call_no_sound_advantages_a_bug(scores, advantages, expected):
    checks = HealthChecks(window=16, score_high=max(1.0, *scores))
    alerts = [alert for _ in range(16) for alert in checks.add_group(scores, advantages=advantages)]
    assert {alert.check for alert in alerts} == expected


def test_a_tracker_counts_failures_and_lets_them_through():
    tracker = PerformanceTracker(slow_ms=1.0)
    tracker.record(2.0, items=3)
    with pytest.raises(ValueError, match="x"), tracker.track():
        raise ValueError("x")
    found = tracker.metrics()
    assert (found["api_perf/failed_requests"], found["api_perf/total_items"]) == (1, 4)
    assert found["api_perf/slow_requests"] >= 1
    assert WelfordAccumulator().std == 0.0


def test_a_state_of_other_items_is_refused():
    learned = CurriculumScheduler(["a", "b", "c"])
    learned.update("a", [1, 0])
    for items in (["x", "y", "z"], ["b", "a", "c"]):
        with pytest.raises(SettingsChangedError, match="learned of other items"):
            CurriculumScheduler(items).load_state_dict(learned.state_dict())
    again = CurriculumScheduler(["a", "b", "c"])
    again.load_state_dict(learned.state_dict())
    assert again.sample(20) == learned.sample(20)


def test_what_would_spoil_figures_is_refused():
    tracker = PerformanceTracker()
    for seconds in (float("nan"), -1.0, float("inf")):
        with pytest.raises(DataError, match="a call lasted"):
            tracker.record(seconds)
    assert tracker.metrics() == {}
    with pytest.raises(ConfigError, match="whole number of 1 or more"):
        PerformanceTracker(window=0)
    with pytest.raises(DataError, match="its bounds are 0 and 1"):
        RewardEnsemble({"a": (0, 1), "b": (0, 1)}).score({"a": [2], "b": [0]})
    with pytest.raises(DataError, match="score 0 is 'a'"):
        HealthChecks().add_group(["a"])


def test_numbers_of_few_bits_are_read_and_infinite_ones_refused():
    welford = WelfordAccumulator()
    welford.update(np.float32(2))
    welford.update(np.float16(4))
    assert welford.mean == 3.0
    with pytest.raises(DataError, match="inf"):
        welford.update(np.float32("inf"))


def test_health_checks_need_no_lengths():
    checks = HealthChecks(window=16)
    found = [one.check for _ in range(32) for one in checks.add_group([1.0, 0.0, None], ratings={"a": [1, 0, None]})]
    assert "length_hacking" not in found


def test_alpha_takes_categories_by_name():
    named = krippendorff_alpha({"a": ["yes", "no", None, "no"], "b": ["yes", "no", "no", "yes"]}, metric="nominal")
    numbered = krippendorff_alpha({"a": [1, 0, None, 0], "b": [1, 0, 0, 1]}, metric="nominal")
    assert named == numbered
    assert named.value == pytest.approx(1 - 2 * 5 / (2 * 3 * 3))  # 1 - D_o / D_e: (2 / 6) / (18 / 30)
    with pytest.raises(DataError, match="'yes'"):
        krippendorff_alpha({"a": ["yes", 1], "b": [1, 1]}, metric="nominal")


@pytest.mark.parametrize(
    "call",
    [
        lambda: RewardEnsemble(None),
        lambda: RewardEnsemble(["a"]),
        lambda: RewardEnsemble({"a": None}),
        lambda: RewardEnsemble({"a": (0,)}),
        lambda: RewardEnsemble({"a": ("0", "1")}),
        lambda: RewardEnsemble({"a": (0, 1)}, weights=[1]),
        lambda: RewardEnsemble({"a": (0, 1)}).score(None),
        lambda: krippendorff_alpha([[1], [1]]),
        lambda: krippendorff_alpha({"a": [1]}, metric=None),
        lambda: CurriculumScheduler("abc"),
        lambda: CurriculumScheduler([None]),
        lambda: CurriculumScheduler(["a"], skills=[None]),
        lambda: CurriculumScheduler(["a"], seed=-1),
        lambda: CurriculumScheduler(["a"]).update(["a"], [1]),
        lambda: CurriculumScheduler(["a"]).update("a", [2]),
        lambda: CurriculumScheduler(["a"]).update("a", [1], step=1 << 63),
        lambda: HealthChecks().add_group([1], step=1.5),
        lambda: HealthChecks().add_group([1], item=None),
        lambda: HealthChecks().add_group([1, 0], lengths=[-1, 2]),
        lambda: PerformanceTracker(window=1.5),
        lambda: PerformanceTracker(slow_ms="x"),
        lambda: PerformanceTracker().record("1"),
        lambda: PerformanceTracker().record(1, items=float("nan")),
        lambda: PerformanceTracker().record(1, failed="no"),
        lambda: PerformanceTracker().record(1, payload=-1),
    ],
)
def test_what_is_of_another_kind_is_refused_in_the_projects_own_words(call):
    with pytest.raises((ConfigError, DataError)):
        call()


@pytest.mark.parametrize(
    "made", [lambda: CurriculumScheduler(["a"]), HealthChecks, lambda: RewardEnsemble({"a": (0, 1)})]
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(made):
    part = made()
    before = part.state_dict()
    bad = [None, [], {}, *({**before, name: None} for name in before if name != "items")]
    for state in bad:
        with pytest.raises(DataError):
            part.load_state_dict(state)
    assert part.state_dict() == before


def test_an_ensemble_counts_agreement_on_from_its_state():
    one, again = RewardEnsemble({"a": (0, 1), "b": (0, 1)}), RewardEnsemble({"a": (0, 1), "b": (0, 1)})
    one.score({"a": [1, 0], "b": [1, 1]})
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for part in (one, again):
        part.score({"a": [0.5, 0], "b": [1, 1]})
    assert one.agreement == again.agreement
    assert one.agreement.units == 4
