"""Datums of the tinker SDK: shifted targets, advantages that mask, provenance that tiles."""

import subprocess
import sys

import numpy as np
import pytest

from lachesis.pipeline.trainer.training_sequence import TrainingSequence

pytest.importorskip("tinker", reason="the extra `tinker` is not installed")

from tinker.types.provenance_spans import PromptProvenanceSpan, SampledProvenanceSpan

from lachesis.pipeline.extensions.tinker.datums import datum_of


def sequence(mask, advantage=0.5, **changes):
    length = len(mask)
    return TrainingSequence(
        tokens=np.arange(10, 10 + length, dtype=np.int32),
        loss_mask=np.array(mask, bool),
        logprobs=np.where(mask, -np.arange(length, dtype=np.float32), np.nan).astype(np.float32),
        advantage=advantage,
        group_id="g",
        **changes,
    )


def values(datum, name):
    return datum.loss_fn_inputs[name].to_numpy().tolist()


def test_targets_are_the_next_tokens_and_what_the_policy_did_not_sample_has_no_advantage():
    datum = datum_of(sequence([0, 0, 1, 1, 0, 1]))
    assert datum.model_input.to_ints() == [10, 11, 12, 13, 14]
    assert values(datum, "target_tokens") == [11, 12, 13, 14, 15]
    assert values(datum, "advantages") == [0, 0.5, 0.5, 0, 0.5]
    assert values(datum, "logprobs") == [0, -2, -3, 0, -5]
    types = {name: datum.loss_fn_inputs[name].dtype for name in ("target_tokens", "advantages", "logprobs")}
    assert types == {"target_tokens": "int64", "advantages": "float32", "logprobs": "float32"}


def test_an_advantage_for_each_token_is_shifted_with_them():
    datum = datum_of(sequence([0, 1, 1], advantage=np.array([9, 1, 2], np.float32)))
    assert values(datum, "advantages") == [1, 2]


def test_what_follows_the_last_trained_token_is_left_out():
    datum = datum_of(sequence([0, 1, 0, 0]))
    assert datum.model_input.to_ints() == [10]
    assert values(datum, "target_tokens") == [11]


def test_provenance_names_group_sample_sequence_and_turn_and_tiles_both_fields():
    datum = datum_of(sequence([0, 0, 1, 1, 0, 1, 1], sample=3, index=4))
    first, second = "g/3.4.0", "g/3.4.1"
    assert datum.model_input_spans == [
        PromptProvenanceSpan(sequence_id=first, offset=0, length=2),
        SampledProvenanceSpan(sequence_id=first, offset=0, length=2),
        PromptProvenanceSpan(sequence_id=second, offset=4, length=1),
        SampledProvenanceSpan(sequence_id=second, offset=0, length=1),
    ]
    assert datum.loss_fn_input_spans == [
        PromptProvenanceSpan(sequence_id=first, offset=1, length=1),
        SampledProvenanceSpan(sequence_id=first, offset=0, length=2),
        PromptProvenanceSpan(sequence_id=second, offset=4, length=1),
        SampledProvenanceSpan(sequence_id=second, offset=0, length=2),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_any_mask_tiles(seed):
    draw = np.random.default_rng(seed)
    mask = draw.random(draw.integers(2, 40)) < 0.5
    mask[0], mask[-1] = False, True
    datum = datum_of(sequence(mask))  # the SDK refuses spans that do not tile
    assert sum(span.length for span in datum.model_input_spans) == len(mask) - 1
    sampled = [span for span in datum.loss_fn_input_spans if isinstance(span, SampledProvenanceSpan)]
    assert sum(span.length for span in sampled) == mask.sum()


@pytest.mark.slow
def test_the_back_end_needs_no_torch():
    names = ("extensions.tinker.backend", "extensions.tinker.serving", "trainer.stage")
    modules = [f"lachesis.pipeline.{name}" for name in names]
    code = f"import sys; sys.modules['torch'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)
