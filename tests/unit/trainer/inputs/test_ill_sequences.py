"""Ill input to the packing of a batch: it is refused with a sentence."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from unit.test_ill_inputs import assert_sentences

from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

SEQUENCE = {
    "tokens": np.arange(2, dtype=np.int32), "loss_mask": np.array([False, True]),
    "logprobs": np.zeros(2, np.float32), "advantage": 1.0,
}  # fmt: skip
ENTRY_POINTS: dict[str, Callable[[Any], Any]] = {
    "pack": pack,
    **{f"pack {name}": lambda x, name=name: pack([TrainingSequence(**{**SEQUENCE, name: x})]) for name in SEQUENCE},
}


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_ill_input_gets_a_sentence(name: str) -> None:
    assert_sentences(ENTRY_POINTS[name])
