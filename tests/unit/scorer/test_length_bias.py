"""Does a rater rate longer answers higher than the other raters do?"""

import random

import numpy as np
import pytest

from lachesis.pipeline.scorer.logic.length_bias import MIN_GROUPS, LengthBias
from lachesis.pipeline.scorer.logic.rating_figures import RaterAgreement
from lachesis.schemas.annotations import GroupScore


def group(lengths: list[int], **ratings: list[float | None]) -> GroupScore:
    return GroupScore(
        group="0" * 32, seq=1, item="i", policy_step=0, scores=[0.0] * len(lengths), ratings=dict(ratings),
        lengths=lengths, disagreement=(0.0, 0.0),
    )  # fmt: skip


def groups(count: int, bias: float) -> list[GroupScore]:
    """Right answers are longer, so both raters go with length; `judge` pays for length by itself besides."""
    rng = random.Random(3)
    made = []
    for _ in range(count):
        right = [float(rng.random() < 0.5) for _ in range(8)]
        lengths = [int(100 + 60 * hit + rng.gauss(0, 20)) for hit in right]
        base = rng.random()  # groups differ in how long their answers are, and how well rated
        judge = [0.3 * base + 0.3 * hit + bias * length / 200 + rng.gauss(0, 0.05)
                 for hit, length in zip(right, lengths, strict=True)]  # fmt: skip
        made.append(group([int(length + 1000 * base) for length in lengths], exact=[*right], judge=[*judge]))
    return made


def test_a_judge_that_pays_for_length_differs_from_one_that_pays_for_what_is_right() -> None:
    fair, biased = LengthBias.of(groups(60, 0.0)), LengthBias.of(groups(60, 0.5))
    assert abs(fair["judge"]) < 0.15
    assert biased["judge"] > 0.5
    plain = np.corrcoef(
        [x - np.mean(one.ratings["judge"]) for one in groups(60, 0.0) for x in one.ratings["judge"]],  # type: ignore[arg-type]
        [x - np.mean(one.lengths) for one in groups(60, 0.0) for x in one.lengths],
    )[0, 1]
    assert plain > 0.5  # without the other rater the fair judge would look as biased


def test_it_is_the_partial_correlation_within_groups() -> None:
    """The oracle: residuals of least squares."""
    made = groups(30, 0.2)
    columns = []
    for one in made:
        rows = np.array([one.ratings["judge"], one.lengths, one.ratings["exact"]], float)
        columns.append(rows - rows.mean(axis=1, keepdims=True))
    x, y, z = np.concatenate(columns, axis=1)
    left = [column - z * (column @ z) / (z @ z) for column in (x, y)]
    assert LengthBias.of(made)["judge"] == pytest.approx(np.corrcoef(*left)[0, 1], abs=1e-9)
    halves = LengthBias(), LengthBias()
    for place, one in enumerate(made):
        halves[place % 2].add_group(one)
    assert halves[0].merged(halves[1])["judge"] == pytest.approx(LengthBias.of(made)["judge"])


def test_a_rater_alone_has_the_plain_correlation_and_too_few_groups_none() -> None:
    made = [group([10, 20, 30], judge=[0.1, 0.2, 0.3]) for _ in range(MIN_GROUPS)]
    assert LengthBias.of(made) == {"judge": pytest.approx(1.0)}
    assert LengthBias.of(made[1:]) == {}
    assert LengthBias.of([group([10, 20, 30], judge=[0.5, 0.5, 0.5])] * 20) == {}
    assert LengthBias.of([group([10, 20], judge=[0.5, None])] * 20) == {}
    assert LengthBias.of([group([10, 10], judge=[0.5, 0.7])] * 20) == {}
    copies = [group([10, 25, 30], judge=[0.1, 0.2, 0.3], other=[0.1, 0.2, 0.3]) for _ in range(20)]
    assert LengthBias.of(copies) == {}  # all that it says the other says too


def test_the_figures_of_a_run_have_it_and_forget_old_groups() -> None:
    agreement = RaterAgreement()
    for one in groups(400, 0.0) + groups(256, 0.5):
        agreement.add_group(one)
    assert agreement.metrics("sums")["reward/sums/length_bias/judge"] > 0.5
