"""Which tokens end a sample: every id that lies beside a model, whatever file names it."""

import json

import pytest

from lachesis.pipeline.model.end_tokens import end_tokens, named_end_tokens
from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.schemas.errors import ConfigError


def saved(folder, generation, config):
    """Save a model with these ids in its two files; None: no such file, or no id in it."""
    policy = build_tiny_policy(0, width=16, layers=1, heads=2)
    save_policy(policy, folder)
    path = folder / "generation_config.json"
    if generation is None:
        path.unlink()
    else:
        path.write_text(json.dumps({"eos_token_id": generation}))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": config}))
    return policy.tokenizer


@pytest.mark.parametrize(
    ("generation", "config", "right"),
    [
        ([2, 7, 9], 2, {2, 7, 9}),  # Gemma, Phi, Llama 3.1
        (7, 2, {2, 7}),  # the tokenizer's own as well
        (None, [7, 9], {2, 7, 9}),  # without a generation_config.json
        (None, 7, {2, 7}),
        ([7, 100_000], 2, {2, 7}),  # one that the model cannot sample
    ],
)
def test_every_id_counts_from_whichever_file_has_it(tmp_path, generation, config, right):
    tokenizer = saved(tmp_path, generation, config)
    policy = load_model(tmp_path)
    assert end_tokens(policy.model, policy.tokenizer) == right
    assert named_end_tokens(str(tmp_path), tokenizer) == right


def test_a_damaged_file_is_named(tmp_path):
    tokenizer = saved(tmp_path, 2, 2)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="generation_config"):
        named_end_tokens(str(tmp_path), tokenizer)


def test_a_folder_with_a_tokenizer_alone_has_its_own(tmp_path):
    tokenizer = build_tiny_policy(0, width=16, layers=1, heads=2).tokenizer
    assert named_end_tokens(str(tmp_path), tokenizer) == {tokenizer.eos_token_id}
