"""Batches made again: equal to what the batcher made of the same, and different where anything else went in."""

import math

import msgspec
import pytest

from lachesis.pipeline.batcher.join import group_ref
from lachesis.pipeline.batcher.whitening import whiten_batch
from lachesis.pipeline.ledger.chain import make_batch
from lachesis.pipeline.offline.reproduction.logic import (
    BatchIngredient,
    difference,
    numerics_after,
    numerics_differences,
    rebuilt,
)
from lachesis.schemas.annotations import GroupReward
from lachesis.schemas.ledger import GENESIS, Numerics, TrainReport
from lachesis.schemas.planning_header import Plan


def ingredient(n, lengths=()):
    plan = Plan(
        group=f"{n:032x}", sequences=2, samples=2, tokens=8, policy_step=3, producer="p", epoch=1, counter=n,
        started_ns=1,
    )  # fmt: skip
    reward = GroupReward(
        group=plan.group, seq=n, item="i", policy_step=3, verdict="trainable", scores=[0.5, None], rewards=[0.1, None],
        advantages=[0.1 * n, None], snapshot="s", mean=0.0, std=1.0, range=1.0, n_valid=1, lengths=list(lengths),
    )  # fmt: skip
    return BatchIngredient(n, "sums", plan, reward, n if n % 2 else None)


def batched(parts):
    """What the batcher makes of it, in whatever order it chose them."""
    refs = [group_ref(*part) for part in reversed(parts)]
    lengths = {part.seq: part.reward.lengths for part in parts if part.reward.lengths}
    return make_batch(4, whiten_batch(refs, lengths, 1e-3), 8)


@pytest.mark.parametrize("lengths", [(), (3, 2)])
def test_the_same_ingredients_make_the_same_batch(lengths):
    parts = [ingredient(n, lengths) for n in (3, 5, 6, 9)]
    batch = batched(parts)
    assert batch.complete
    found = rebuilt(batch, parts, 1e-3)
    assert found == batch
    assert difference(batch, found) is None


def test_the_last_bit_of_an_advantage_is_a_difference():
    parts = [ingredient(n) for n in (3, 5, 6)]
    batch = batched(parts)
    changed = msgspec.structs.replace(parts[1].reward, advantages=[math.nextafter(0.5, 1), None])
    text = difference(batch, rebuilt(batch, [parts[0], parts[1]._replace(reward=changed), parts[2]], 1e-3))
    assert text == (
        f"batch 4, group {5:032x}: advantages is [0.5, None] in the ledger, [0.5000000000000001, None] by the streams"
    )


@pytest.mark.parametrize(("changes", "said"), [
    ({"tokens": 9}, "tokens is 8 in the ledger, 9"), ({"policy_step": 4}, "policy_step is 3 in the ledger, 4"),
    ({"group": "f" * 32}, f"group is {3:032x} in the ledger, {'f' * 32}"),
])  # fmt: skip
def test_another_rollout_is_a_difference(changes, said):
    parts = [ingredient(n) for n in (3, 5)]
    batch = batched(parts)
    other = parts[0]._replace(plan=msgspec.structs.replace(parts[0].plan, **changes))
    assert said in difference(batch, rebuilt(batch, [other, parts[1]], 1e-3))


def test_a_group_less_is_a_difference():
    parts = [ingredient(n) for n in (3, 5)]
    assert "2 groups in the ledger, 1 by" in difference(batched(parts), rebuilt(batched(parts), parts[:1], 1e-3))


def test_machines_are_told_apart_by_what_changes_bits():
    one = Numerics(torch="2", processor="a", instructions="AVX2", threads=1, learner="{}")
    assert numerics_differences(one, msgspec.structs.replace(one, learner="")) == []
    assert numerics_differences(one, msgspec.structs.replace(one, threads=4, processor="b")) == [
        "processor was a, is b",
        "threads was 1, is 4",
    ]
    given = msgspec.structs.replace(one, inputs=("routed_experts",))
    assert numerics_differences(given, one) == ["inputs was ('routed_experts',), is ()"]


def test_a_step_was_taken_as_the_first_report_says_that_covers_it():
    one = Numerics(torch="1", processor="a", instructions="AVX2", threads=1, learner="{}")
    two = msgspec.structs.replace(one, torch="2")
    reports = [
        TrainReport(run="r", trainer="t", lineage="l", term="t", step=step, ledger_index=step, chain=GENESIS,
                    next_batch=step, policy_version="v", checkpoint="c", numerics=numerics)
        for step, numerics in [(2, one), (2, None), (4, None), (7, two)]
    ]  # fmt: skip
    assert [numerics_after(reports, steps) for steps in range(9)] == [one] * 2 + [None] * 2 + [two] * 5
    assert numerics_after([], 0) is None
