"""The context of a model by its configuration, and what a run cannot train because positions change within it."""

import msgspec
import pytest
from transformers import GPT2Config, LlamaConfig, MambaConfig, MptConfig, Phi3Config, Qwen2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3Config

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.policy_context import context_of_server
from lachesis.pipeline.model.context import (
    check_positions,
    context_length,
    context_of_model,
    untrainable_positions,
)
from lachesis.schemas.errors import ConfigError
from lachesis.services.stage_settings import policy_context

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
PHI3 = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 1024,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "right"),
    [
        (Qwen2Config(max_position_embeddings=1024, rope_parameters=YARN), 4096),
        (Qwen2Config(max_position_embeddings=4096, rope_parameters=YARN), 4096),
        (LlamaConfig(max_position_embeddings=2048, rope_parameters={**YARN, "rope_type": "linear"}), 2048),
        (GPT2Config(n_positions=512), 512),
        (MptConfig(max_seq_len=300), 300),
        (MambaConfig(), 8192),
        (LlamaConfig(max_position_embeddings=10**30), 8192),
        (Gemma3Config(text_config={"max_position_embeddings": 777}), 777),
    ],
)
def test_the_context_is_what_the_configuration_says(config, right, tmp_path):
    assert context_length(config) == right
    config.save_pretrained(tmp_path)
    assert context_of_model(str(tmp_path)) == right, "the checks before a start read the same"


def run(model, **engine):
    return msgspec.convert({"model": str(model), "inference": {"policy": {"engine": engine}}}, run_config_type())


def test_positions_that_change_within_what_a_run_samples_are_refused(tmp_path):
    config = Phi3Config(**PHI3)
    config.save_pretrained(tmp_path)
    assert policy_context(run(tmp_path)) == 4096
    problem = untrainable_positions(policy_context(run(tmp_path)), config)
    assert "phi3 beyond 1024 tokens" in problem
    assert "inference.policy.engine.max_model_len to 1024 at most" in problem
    with pytest.raises(ConfigError, match="model: sequences of phi3"):
        check_positions(4096, config)
    assert untrainable_positions(policy_context(run(tmp_path, max_model_len=1024)), config) is None
    assert untrainable_positions(policy_context(run(tmp_path)), LlamaConfig()) is None


@pytest.mark.parametrize(
    ("args", "right"),
    [
        (["--max-model-len", "512"], 512),
        (["--max-model-len=512"], 512),
        (["--max-model-len=64", "--max-model-len", "512"], 512),
        (["--max-model-len=8k"], None),
        (["--max-model-len"], 4096),
    ],
)
def test_the_context_that_arguments_of_vllm_set_is_read_in_both_spellings(args, right, tmp_path):
    Phi3Config(**PHI3).save_pretrained(tmp_path)
    assert context_of_server(InferenceConfig(kind="vllm", args=args), str(tmp_path)) == right
