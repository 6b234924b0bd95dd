"""How a model is to be decoded: context, positions that change, models that cannot be sampled, ways that are wrong."""

import logging

import pytest
import torch
from contract.model_families import family_model

from lachesis.pipeline.inference.engines.reference.decoding import (
    PaddedBatch,
    SeparateRows,
    UnpaddedBatch,
    WholeSequences,
)
from lachesis.pipeline.inference.engines.reference.decoding_choice import choose_decoding
from lachesis.pipeline.model.context import context_length, positions_change_at
from lachesis.schemas.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "right"), [("qwen3", 96), ("gpt2", 96), ("mpt", 96), ("mamba", 8192), ("bloom", 8192)]
)
def test_the_context_is_what_the_model_says_or_a_sensible_one(name, right):
    assert context_length(family_model(name).config) == right


@pytest.mark.slow
def test_sequences_of_different_positions_share_a_pass_only_below_the_change():
    model = family_model("phi3")
    assert positions_change_at(model.config, 90) == 24
    assert positions_change_at(model.config, 24) is None
    assert type(choose_decoding(model, 24)) is PaddedBatch
    assert type(choose_decoding(model, 90)) is SeparateRows
    assert positions_change_at(family_model("qwen3").config, 10**9) is None


def test_positions_that_depend_on_what_was_read_before_are_refused_beyond_the_first_context():
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=96, max_position_embeddings=32, rope_parameters=rope, **sizes)
    ).eval()
    assert type(choose_decoding(model, context_length(model.config))) is PaddedBatch
    with pytest.raises(ConfigError, match=r"beyond 32 tokens .* set max_model_len"):
        choose_decoding(model, 33)


@pytest.mark.slow
def test_a_way_that_gives_other_logits_is_not_taken(monkeypatch, caplog):
    model = family_model("qwen3")
    append = PaddedBatch.append_tokens

    def shifted(self, tokens):
        self._lengths = self._lengths + 1
        append(self, tokens)

    monkeypatch.setattr(PaddedBatch, "append_tokens", shifted)
    caplog.set_level(logging.INFO, "lachesis")
    assert type(choose_decoding(model, 90)) is SeparateRows
    assert "Qwen3ForCausalLM is decoded row by row" in caplog.text
    monkeypatch.setattr(SeparateRows, "append_tokens", lambda self, tokens: None)
    assert type(choose_decoding(model, 90)) is WholeSequences
    monkeypatch.setattr(WholeSequences, "append_tokens", lambda self, tokens: None)
    with pytest.raises(
        ConfigError, match=r"Qwen3ForCausalLM cannot be sampled by the reference server\. Tried: logits are"
    ):
        choose_decoding(model, 90)


def test_states_are_never_read_through_padding():
    assert type(choose_decoding(family_model("qwen3_5"), 90)) is UnpaddedBatch


def test_a_model_that_looks_ahead_is_refused():
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertLMHeadModel(BertConfig(vocab_size=96, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    with pytest.raises(ConfigError, match="BertLMHeadModel is not causal"):
        choose_decoding(model, 90)


def test_broken_weights_are_named():
    model = family_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ConfigError, match="not finite"):
        choose_decoding(model, 90)
