"""The parts as a library: columns of numpy and torch, and what is no column of numbers."""

import numpy as np
import pytest
import torch

from lachesis import (
    CurriculumScheduler,
    HealthChecks,
    RewardEnsemble,
    RewardNormalizer,
    WelfordAccumulator,
    krippendorff_alpha,
)
from lachesis.schemas.errors import ConfigError, DataError

pytestmark = pytest.mark.outside

NAN, INF = float("nan"), float("inf")
NOT_A_COLUMN = [
    None, 5, "12", b"12", {1: 2}, {1, 2}, [1, "x"], ["1"], [1, NAN], [1, -INF], [1, [2]], [1, 1j], [1, 10**400],
    np.ones((2, 2)), np.array(1.0), torch.ones(2, 2), torch.tensor(1.0), [1, object()],
]  # fmt: skip


@pytest.mark.parametrize("column", NOT_A_COLUMN, ids=range(len(NOT_A_COLUMN)))
def test_every_part_refuses_a_column_that_is_none_and_counts_nothing(column):
    ensemble, health, items = (
        RewardEnsemble({"a": (0, 1), "b": (0, 1)}),
        HealthChecks(),
        CurriculumScheduler(["ab", "x"]),
    )
    welford, normalizer = WelfordAccumulator(), RewardNormalizer()
    before = items.state_dict()
    for call in (
        lambda: krippendorff_alpha({"a": column, "b": [1, 1]}),
        lambda: krippendorff_alpha({"a": column, "b": [1, 1]}, metric="ratio"),
        lambda: ensemble.score({"a": column, "b": [1, 1]}),
        lambda: welford.update_batch(column),
        lambda: normalizer.normalize(column),
        lambda: items.update("x", column),
        lambda: health.add_group(column),
        lambda: health.add_group([1, 0], ratings={"a": column}),
        lambda: health.add_group([1, 0], advantages=column if column is not None else "x"),
        lambda: health.add_group([1, 0], lengths=column if column is not None else "x"),
        lambda: CurriculumScheduler(["a", "b"], difficulty=column if column is not None else "x"),
    ):
        with pytest.raises((ConfigError, DataError)):
            call()
    assert ensemble.agreement.units == welford.count == normalizer.count == health.state_dict()["groups"] == 0
    assert items.state_dict() == before


@pytest.mark.parametrize(
    "column",
    [np.array([0.5, 1.0]), torch.tensor([0.5, 1.0], requires_grad=True), torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
     [np.float32(0.5), torch.tensor(1)], (one for one in (0.5, True))],
)  # fmt: skip
def test_numbers_of_numpy_and_torch_are_numbers(column):
    values = list(column)
    assert RewardEnsemble({"a": (0, 1)}, aggregation="mean").score({"a": values}).scores == [0.5, 1.0]
    alpha = krippendorff_alpha({"a": values, "b": np.array([0, 1])})
    assert alpha.value == pytest.approx(1 - (0.25 / 4 * 2) / (2 * (4 * 2.25 - 2.5**2) / 12))
    welford = WelfordAccumulator()
    welford.update_batch(values)
    assert (welford.mean, welford.variance) == (0.75, 0.0625)
    assert RewardNormalizer(warmup=np.int64(9), clip=torch.tensor(3.0)).normalize(values) == [0.5, 1.0]
    assert CurriculumScheduler(["x"]).update("x", values, step=np.int64(3))
    checks = HealthChecks(window=16)
    found = [one for _ in range(32) for one in checks.add_group(values, lengths=torch.tensor([3, 4]))]
    assert "nonfinite" not in {one.check for one in found}


@pytest.mark.parametrize(
    "items", [np.arange(3), torch.arange(3), [torch.tensor(0), np.int8(1), 2], np.array(["a", "b"])]
)
def test_items_are_named_in_python_s_own_numbers_and_texts(items):
    scheduler = CurriculumScheduler(items, skills=items)
    drawn = scheduler.sample(5)
    assert {type(one) for one in [*drawn, *scheduler.weights()]} <= {int, str}
    assert scheduler.update(drawn[0], [1, 0])
