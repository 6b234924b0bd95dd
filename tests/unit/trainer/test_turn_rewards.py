"""Rewards of turns reach the tokens of their turns, through all sequences of a sample."""

import re

import msgspec
import numpy as np
import pytest
from turn_groups import group, ref

from lachesis.pipeline.common.trainability import TrainerLimits, why_untrainable
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import select_trainable, shuffled
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.packing import pack_mask


def test_each_token_carries_the_advantage_of_its_turn():
    batch = pack(select_trainable([(ref(), group(), None)], TrainerLimits()).sequences)
    found = [batch.advantages_BT[row][batch.mask_BT[row]].tolist() for row in range(3)]
    assert found == [[20.0, 20.0], [10.0, 40.0, 40.0], [-1.0]]


def test_a_turn_ends_with_its_sequence():
    sequences = group().sequences
    trained = msgspec.structs.replace(
        sequences, loss_mask=pack_mask(np.array([0, 1, 1, 1, 0, 0, 0, 0, 1, 1], np.bool_)), turn_order=None,
        turn_rewards=[[1.0, 2.0], [3.0]],
    )  # fmt: skip
    assert trained.turns().tolist() == [-1, 0, 0, 1, -1, -1, -1, -1, 0, 0]


def test_the_control_with_shuffled_advantages_keeps_the_number_of_turns():
    found = {tuple(map(tuple, shuffled(ref(), seed).turn_advantages)) for seed in range(8)}
    assert found == {((10.0, 20.0, 40.0), (-1.0,)), ((-1.0, -1.0, -1.0), (10.0,))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"turn_advantages": []}, "rewards of turns, but its batch has no advantages of them"),
        ({"turn_advantages": [[1.0], [1.0]]}, "sample 0 has advantages of 1 turns, and more turns than that"),
    ],
)
def test_a_batch_without_advantages_of_the_turns_costs_the_group_alone(changes, named):
    assert named in select_trainable([(ref(**changes), group(), None)], TrainerLimits()).dropped[1]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"turn_order": [[0, 1], [0]]}, "turn_rewards: 3 for sample 0, where the loss mask lets in 3 runs of tokens"),
        ({"turn_order": [[0, 1, 3], [0]]}, "turn_order: sample 0 has 3 turns, and a run is of none of them"),
        ({"turn_rewards": [[1.0], [2.0]], "turn_order": None}, "turn_rewards: 1 for sample 0, where .* 3 runs"),
        ({"token_advantages": bytes(40)}, "turn_rewards and token_advantages: .* give one of them"),
    ],
)
def test_turns_that_are_not_those_of_the_tokens_are_refused_by_name(columns, named):
    assert why_untrainable(group(), TrainerLimits()) is None
    assert re.match(named, why_untrainable(group(**columns), TrainerLimits()))


def test_an_order_without_rewards_is_refused():
    with pytest.raises(SchemaError, match="turn_order: it orders the turn_rewards"):
        group(turn_rewards=None)


@pytest.mark.parametrize(
    ("parents", "named"),
    [
        ([[-1, 0], [-1]], "turn_parents: it has to name a parent for each of the turn_rewards of each sample"),
        ([[-1, 1, 0], [-1]], "turn_parents: turn 1 of sample 0 continues turn 1, which is not before it"),
        ([[-2, 0, 0], [-1]], "turn_parents: turn 0 of sample 0 continues turn -2"),
    ],
)
def test_a_tree_of_turns_that_is_none_is_refused(parents, named):
    with pytest.raises(SchemaError, match=named):
        group(turn_parents=parents)
