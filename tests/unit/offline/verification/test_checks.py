"""Verification finds what is planted, and nothing in what is sound."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.offline.verification.checks import (
    accuracy,
    advantage_stability,
    determinism,
    distribution,
    loss_agreement,
)
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.dtype_comparison import losses
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

pytestmark = pytest.mark.outside

BOUNDS = {"a": (0.0, 1.0)}


def test_a_rater_that_says_the_same_again_is_deterministic() -> None:
    (found,) = determinism([{"a": [0.1, None, 0.9]}] * 3)
    assert (found.verdict, found.subject) == ("ok", "a")


@pytest.mark.parametrize("second", [[0.1, 0.5], [0.1001, 0.4], [0.1, None]])
def test_a_rater_that_wavers_fails(second: list[float | None]) -> None:
    found = determinism([{"a": [0.1, 0.4], "b": [1.0, 1.0]}, {"a": second, "b": [1.0, 1.0]}])
    assert [finding.verdict for finding in found] == ["fail", "ok"]
    assert "1 of 2" in found[0].text


def test_differences_below_the_tolerance_pass() -> None:
    (found,) = determinism([{"a": [0.1]}, {"a": [0.1 + 1e-8]}], atol=1e-6)
    assert found.verdict == "ok"


@pytest.mark.parametrize(
    ("column", "verdict", "says"),
    [
        ([0.1, 0.5, 0.9, 0.3], "ok", "mean 0.45"),
        ([0.5] * 10, "warn", "every rating is 0.5"),
        ([1.0] * 97 + [0.2] * 3, "warn", "97% lie at the highest"),
        ([0.0] * 97 + [0.2] * 3, "warn", "97% lie at the lowest"),
        ([0.2, 0.8, 0.4, None], "warn", "25% missing"),
        ([None, None], "fail", "no rating"),
    ],
)
def test_what_a_raters_values_tell(column: list[float | None], verdict: str, says: str) -> None:
    (found,) = distribution({"a": column}, BOUNDS)
    assert found.verdict == verdict
    assert says in found.text


@pytest.mark.parametrize("estimator", ["centred", "grpo", "rloo", "opo", "maxrl"])
def test_the_estimators_are_stable_also_where_rewards_are_nearly_equal(estimator: str) -> None:
    rng = np.random.default_rng(0)
    groups: list[list[float | None]] = [rng.random(8).tolist() for _ in range(20)]
    groups += [[0.5] * 8, [0.5] * 7 + [0.5 + 1e-7], [0.0] * 7 + [1.0], [0.35] * 7 + [0.95], [None, 0.2, 0.4]]
    lengths = [[10 + i for i in range(len(group))] for group in groups]
    found = advantage_stability(groups, AdvantageConfig(estimator=estimator), lengths)  # type: ignore[arg-type]
    assert found.verdict == "ok", found.text


def test_an_estimator_without_a_floor_would_be_caught() -> None:
    groups: list[list[float | None]] = [[0.5, 0.5, 0.5, 0.5 + 2e-6]]
    config = AdvantageConfig(estimator="grpo", std_floor=1e-300)
    assert advantage_stability(groups, config, [[1] * 4], tolerance=1e-5).verdict == "fail"


def test_the_loss_agrees_in_both_dtypes_and_a_broken_one_is_told() -> None:
    policy = build_tiny_policy(0, width=32, layers=1, heads=2, max_length=32)
    rng = np.random.default_rng(0)
    vocabulary = policy.model.config.vocab_size
    sequences = [
        TrainingSequence(
            tokens=rng.integers(0, vocabulary, 12).astype(np.int32),
            loss_mask=np.arange(12) > 3,
            logprobs=np.where(np.arange(12) > 3, -3.0, 0.0).astype(np.float32),
            advantage=1.0 if i % 2 else -1.0,
        )
        for i in range(8)
    ]
    torch.set_num_threads(1)
    found, norms = losses(policy, pack(sequences, pad_id=0), LearnerConfig())
    assert list(found) == ["float32", "bfloat16"]
    assert found["float32"] != found["bfloat16"]
    assert loss_agreement(found, norms, rtol=0.2).verdict == "ok"
    assert loss_agreement(found, norms | {"bfloat16": 2 * norms["float32"]}).verdict == "warn"
    assert loss_agreement({"float32": 1.0, "bfloat16": float("nan")}, norms).verdict == "warn"


def test_answers_that_are_all_alike_have_no_gradient_in_either_dtype() -> None:
    none = {"float32": 0.0, "bfloat16": 0.0}
    assert loss_agreement(none, none).verdict == "ok"
    assert loss_agreement(none, none | {"bfloat16": 1e-3}).verdict == "warn"


def test_a_rater_that_contradicts_the_others_is_seen_without_labels() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(300) < 0.5
    ratings = {
        name: [float(t == (u < p)) for t, u in zip(truth, rng.random(300), strict=True)]
        for name, p in (("a", 0.9), ("b", 0.9), ("c", 0.8), ("contrary", 0.1))
    }
    found = {finding.subject: finding for finding in accuracy(ratings, 0.5)}
    assert {name: finding.verdict for name, finding in found.items()} == {
        "a": "ok", "b": "ok", "c": "ok", "contrary": "warn",
    }  # fmt: skip
    assert "300 verdicts" in found["a"].text
    assert accuracy({"a": [1.0], "b": [None]}, 0.5) == []


def test_an_estimator_that_refuses_the_rewards_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def by_style(group): return group.ratings['style']\n")
    config = AdvantageConfig(estimator=f"{tmp_path}/mine.py:by_style")
    found = advantage_stability([[0.0, 1.0]], config, [[1, 1]])
    assert (found.verdict, "not checked" in found.text, "KeyError" in found.text) == ("warn", True, True)
