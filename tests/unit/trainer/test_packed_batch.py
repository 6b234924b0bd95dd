"""Packing: positions, padding, refusals, and micro-batches that cover every row once."""

import numpy as np
import pytest
import torch
from fuzz.examples import group
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.errors import UnsupportedError
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import training_sequences
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.sequences import Sequences


def sequence(length=4, prompt=2, **changes):
    values = {
        "tokens": np.arange(1, length + 1, dtype=np.int32),
        "loss_mask": np.arange(length) >= prompt,
        "logprobs": np.full(length, -0.5, np.float32),
        "advantage": 1.0,
        "group_id": "g",
        "policy_step": 3,
    }
    return TrainingSequence(**{**values, **changes})


def test_pack_pads_on_the_right_and_zeroes_everything_off_the_mask():
    batch = pack([sequence(3, 1), sequence(5, 4, advantage=np.full(5, 2, np.float32), group_id="h")], pad_id=9)
    assert batch.tokens_BT.tolist() == [[1, 2, 3, 9, 9], [1, 2, 3, 4, 5]]
    assert batch.mask_BT.int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 1]]
    assert batch.logprobs_BT.tolist() == [[0, -0.5, -0.5, 0, 0], [0, 0, 0, 0, -0.5]]
    assert batch.advantages_BT.tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 0, 2]]
    assert (batch.group_ids, batch.policy_steps) == (("g", "h"), (3, 3))
    assert (batch.sequences, batch.trainable_tokens) == (2, 3)
    assert not batch.teacher_mask_BT.any()


def test_teacher_of_one_sequence_leaves_the_other_without():
    batch = pack([sequence(teacher_logprobs=np.full(4, -1, np.float32)), sequence()])
    assert batch.teacher_mask_BT.int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]]
    assert batch.teacher_logprobs_BT.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]


def test_values_off_the_mask_are_not_looked_at():
    logprobs = np.array([np.nan, 5, -1, -1], np.float32)
    advantage = np.array([np.inf, np.nan, 1, 1], np.float32)
    batch = pack([sequence(logprobs=logprobs, advantage=advantage)])
    assert batch.logprobs_BT.tolist() == [[0, 0, -1, -1]]
    assert batch.advantages_BT.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": np.array([], np.int32)}, "no tokens"),
        ({"loss_mask": np.ones(3, bool)}, "loss_mask of shape"),
        ({"logprobs": np.zeros((4, 1), np.float32)}, "logprobs of shape"),
        ({"advantage": np.zeros(5, np.float32)}, "advantage of shape"),
        ({"teacher_logprobs": np.zeros(1, np.float32)}, "teacher_logprobs of shape"),
        ({"loss_mask": np.ones(4, bool)}, "position 0"),
        ({"tokens": np.array([1, -2, 3, 4], np.int32)}, "negative token id"),
        ({"logprobs": np.array([0, 0, np.nan, -1], np.float32)}, "logprobs that are not finite"),
        ({"logprobs": np.array([0, 0, 1.0, -1], np.float32)}, "logprobs above 0"),
        ({"teacher_logprobs": np.array([0, 0, -np.inf, -1], np.float32)}, "teacher_logprobs that are not finite"),
        ({"advantage": float("nan")}, "advantage that are not finite"),
        ({"advantage": np.array([0, 0, np.inf, 1], np.float32)}, "advantage that are not finite"),
        # a mask of integers would select by number, and look at other values than it lets in
        (
            {"loss_mask": np.array([0, 0, 1, 1]), "logprobs": np.array([-1, -1, np.nan, -1])},
            "array of int64 as loss_mask",
        ),
        ({"loss_mask": np.array([0, 0, np.nan, 1])}, "array of float64 as loss_mask"),
        ({"loss_mask": [False, False, True, True]}, "as loss_mask; give a numpy array of bool"),
        ({"tokens": np.array([1, 2, np.nan, 4])}, "array of float64 as tokens"),
        ({"tokens": None}, "None as tokens"),
        ({"logprobs": None}, "None as logprobs"),
        ({"logprobs": [-1.0, -1.0, float("inf"), -1.0]}, "as logprobs"),
        ({"advantage": None}, "None as advantage"),
        ({"advantage": "1"}, "'1' as advantage"),
        ({"advantage": np.float32("inf")}, "advantage that are not finite"),
        ({"advantage": np.array([0, 0, None, 1])}, "array of object as advantage"),
    ],
)
def test_bad_sequences_are_refused_by_place_and_reason(changes, text):
    with pytest.raises(DataError, match=f"sequence 1 of the batch.*{text}"):
        pack([sequence(), sequence(**changes)])


def test_empty_batch_is_refused():
    with pytest.raises(DataError, match="at least one sequence"):
        pack([])


@given(st.lists(st.integers(2, 30), min_size=1, max_size=20), st.integers(1, 200))
def test_microbatches_cover_every_row_once_within_the_budget(lengths, budget):
    batch = pack([sequence(n, 1, group_id=str(i)) for i, n in enumerate(lengths)])
    rows, parts = zip(*batch.microbatches(budget), strict=True)
    assert sorted(torch.cat(rows).tolist()) == list(range(len(lengths)))
    for rows_b, part in zip(rows, parts, strict=True):
        assert part.group_ids == tuple(batch.group_ids[row] for row in rows_b)
        assert torch.equal(part.lengths_B, batch.lengths_B[rows_b])
        assert torch.equal(part.tokens_BT, batch.tokens_BT[rows_b, : part.tokens_BT.shape[1]])
        assert part.tokens_BT.shape[1] == int(part.lengths_B.max())
        assert part.tokens_BT.numel() <= budget or part.sequences == 1
    assert [length for part in parts for length in part.lengths_B.tolist()] == sorted(lengths, reverse=True)


def test_a_group_without_logprobs_is_refused_by_name():
    plain = group()
    bare = plain.replace(sequences=replace(plain.sequences, logprobs=None))
    ref = GroupRef(group=plain.id, seq=1, env="e", sequences=2, tokens=9, policy_step=0,
                   advantages=[1.0] * plain.sequences.n_samples)  # fmt: skip
    with pytest.raises(UnsupportedError, match="it has no logprobs"):
        training_sequences(ref, bare, None, TrainerLimits(plain.tokenizer_hash))


@pytest.mark.parametrize("advantage", [1e60, -1e39])
def test_an_advantage_beyond_the_tensors_costs_its_group(advantage):
    """The ledger holds 64-bit numbers, the tensors 32-bit ones."""
    plain = group()
    plain = plain.replace(sequences=replace(plain.sequences, token_advantages=None))
    ref = GroupRef(group=plain.id, seq=1, env="e", sequences=2, tokens=9, policy_step=0,
                   advantages=[advantage] * plain.sequences.n_samples)  # fmt: skip
    with pytest.raises(DataError, match="advantage that are not finite"):
        training_sequences(ref, plain, None, TrainerLimits(plain.tokenizer_hash, reads=None))


@pytest.mark.parametrize(
    ("sample_index", "reasons", "kept"),
    [
        (None, ["stop", "length", "stop"], [0, 2]),
        ([0, 0, 1], ["stop", "length", "stop"], [2]),  # the whole of a sample whose last sequence was cut off
        ([0, 0, 1], ["length", "stop", "stop"], [0, 1, 2]),  # a turn that was cut off, in a sample that went on
    ],
)
def test_samples_that_were_cut_off_are_left_out_where_the_trainer_says_so(sample_index, reasons, kept):
    rows = 3
    columns = Sequences(
        offsets=as_bytes(np.arange(0, 4 * rows + 1, 4), "int32"),
        tokens=as_bytes(np.ones(4 * rows), "int32"),
        loss_mask=pack_mask(np.tile([False, True, True, True], rows)),
        logprobs=as_bytes(np.full(4 * rows, -1.0), "float32"),
        finish_reasons=reasons,
        version_spans=[],
        sample_index=sample_index,
    )
    plain = group().replace(sequences=columns)
    ref = GroupRef(group=plain.id, seq=1, env="e", sequences=rows, tokens=12, policy_step=0,
                   advantages=[1.0] * columns.n_samples)  # fmt: skip
    all_of_them = training_sequences(ref, plain, None, TrainerLimits())
    chosen = training_sequences(ref, plain, None, TrainerLimits(truncated=False))
    assert [one.index for one in all_of_them] == [0, 1, 2]
    assert [one.index for one in chosen] == kept
    cut = plain.replace(sequences=replace(columns, finish_reasons=["length"] * rows))
    with pytest.raises(DataError, match="leaves out those cut off at their length limit"):
        training_sequences(ref, cut, None, TrainerLimits(truncated=False))
