"""Every family of models is trained on rows in one where that gives what padded rows give, and on padded rows else."""

import math

import numpy as np
import pytest
import torch
from contract.model_families import FAMILIES, family_model

from lachesis.pipeline.model.packed_form import why_padded_by_form
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

PADDED = {
    "bamba", "bloom", "falcon", "falcon_h1", "falcon_mamba", "granite_hybrid", "jamba", "kimi_linear", "lfm2", "mamba",
    "mamba2", "minimax", "mpt", "nemotron_h", "olmo_hybrid", "phi3", "qwen3_5", "qwen3_next", "recurrent_gemma",
    "xlstm", "zamba2",
}  # fmt: skip
"""Families with states, convolutions, biases by distance, or positions that depend on a pass's longest row."""
PADDED_BY_COMPARISON = {"gemma4"}
"""Families whose code takes masks apart, which no form tells."""
LENGTHS = (40, 3, 17, 25, 1, 9, 33)

pytestmark = [
    pytest.mark.parametrize("name", FAMILIES),
    pytest.mark.filterwarnings("ignore"),  # transformers' own, of configurations as small as these
]


def a_batch():
    draw = np.random.default_rng(0)
    return pack(
        [
            TrainingSequence(
                tokens=draw.integers(3, 40, length).astype(np.int32),
                loss_mask=(np.arange(length) > length // 4) & (np.arange(length) > 0),
                logprobs=np.full(length, -math.log(40), np.float32),
                advantage=(-1.0) ** row,
                group_id=str(row),
            )
            for row, length in enumerate(LENGTHS)
        ]
    )


def a_step(name, **settings):
    model = family_model(name)
    before = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    learner = Learner(model, LearnerConfig(learning_rate=1e-3, warmup_steps=0, **settings))
    metrics = learner.step(a_batch())
    after = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return metrics, after - before


def test_a_step_on_rows_in_one_is_that_on_padded_rows(name):
    needs_padding = why_padded_by_form(family_model(name))
    assert (needs_padding is not None) == (name in PADDED), needs_padding
    if needs_padding is not None:
        return
    packed, moved = a_step(name)
    if name in PADDED_BY_COMPARISON:
        assert not packed.packed
        return
    padded, expected = a_step(name, packing=False)
    assert packed.packed, "what a plan says by the form is what a trainer does"
    assert not padded.packed
    assert packed.padding == 0 < padded.padding
    assert packed.loss == pytest.approx(padded.loss, rel=1e-5)
    assert packed.grad_norm == pytest.approx(padded.grad_norm, rel=1e-4)
    assert packed.entropy == pytest.approx(padded.entropy, rel=1e-5)
    # AdamW's first step moves a weight by its rate along the sign of its gradient, which turns where that is all but 0
    assert (moved - expected).abs().gt(1e-4).float().mean() < 1e-3
