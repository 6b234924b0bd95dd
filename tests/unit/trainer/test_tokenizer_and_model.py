"""The local model and tokenizer: size, chat template, round trip through a folder, identity of the hash."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lachesis.pipeline.model.policy import build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.tokenizer import (
    ALPHABET,
    build_character_tokenizer,
    common_beginning,
    save_tokenizer,
    tokenizer_hash,
)
from lachesis.schemas.errors import ConfigError

PHRASE = "Spell this word backward: "


def chat(tokenizer, *turns):
    messages = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_default_model_has_about_0_4_million_parameters():
    assert 0.35e6 < sum(p.numel() for p in build_tiny_policy(0).model.parameters()) < 0.55e6


def test_same_seed_same_weights_and_global_random_state_untouched():
    state = torch.get_rng_state()
    one, two, other = build_tiny_policy(3), build_tiny_policy(3), build_tiny_policy(4)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [p.model.model.embed_tokens.weight for p in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_chat_template_renders_turns_with_separator_and_end():
    tokenizer = build_character_tokenizer(max_length=64)
    ids = chat(tokenizer, ("user", "ab"), ("assistant", "c"), ("user", "d"))
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|bos|>", "a", "b", "<|sep|>", "c", "<|eos|>", "d", "<|sep|>"]


def test_every_character_of_the_alphabet_survives_the_round_trip():
    tokenizer = build_character_tokenizer(max_length=64)
    ids = tokenizer.encode(ALPHABET, add_special_tokens=False)
    assert len(ids) == len(ALPHABET)
    assert tokenizer.decode(ids) == ALPHABET
    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_phrase_takes_one_token_and_decodes_to_itself():
    tokenizer = build_character_tokenizer(max_length=64, phrases=[PHRASE])
    ids = tokenizer.encode(PHRASE + "cat", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == PHRASE + "cat"


@pytest.mark.parametrize(
    ("prompts", "beginning"), [(["ab c", "ab d", "ab"], "ab"), (["x", "y"], ""), (["same", "same"], "same"), ([""], "")]
)
def test_common_beginning(prompts, beginning):
    assert common_beginning(prompts) == beginning


def test_saved_folder_loads_with_auto_classes_and_gives_the_same_logits_and_hash(tmp_path):
    policy = build_tiny_policy(1, phrases=[PHRASE])
    save_policy(policy, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = chat(tokenizer, ("user", PHRASE + "sun"))
    assert ids == chat(policy.tokenizer, ("user", PHRASE + "sun"))
    assert torch.equal(model(torch.tensor([ids])).logits, policy.model(torch.tensor([ids])).logits)
    loaded = load_model(tmp_path)
    assert loaded.tokenizer_hash == policy.tokenizer_hash == tokenizer_hash(tokenizer)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32


def test_hash_ignores_padding_calls_and_sees_template_and_vocabulary():
    tokenizer = build_character_tokenizer(max_length=64)
    before = tokenizer_hash(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.chat_template += " "
    assert tokenizer_hash(tokenizer) != before
    assert tokenizer_hash(build_character_tokenizer(max_length=64, phrases=["x y"])) != before


def test_missing_model_is_a_config_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing-here.*there is no folder"):
        load_model(tmp_path / "nothing-here")


def test_tokenizer_without_template_is_refused(tmp_path):
    policy = build_tiny_policy(0)
    policy.tokenizer.chat_template = None
    save_policy(policy, tmp_path)
    with pytest.raises(ConfigError, match="a chat template"):
        load_model(tmp_path)


def test_a_saved_tokenizer_is_in_words_that_transformers_4_reads_as_well(tmp_path):
    """Version 4 knows no class TokenizersBackend, and wants a mapping of `extra_special_tokens`."""
    saved = build_character_tokenizer(max_length=64, phrases=["spell "])
    save_tokenizer(saved, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<|sep|>"]
    assert "extra_special_tokens" not in settings
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer_hash(loaded) == tokenizer_hash(saved)
    assert loaded.all_special_ids == saved.all_special_ids
    assert loaded.decode([1, 20, 3, 2], skip_special_tokens=True) == saved.decode(
        [1, 20, 3, 2], skip_special_tokens=True
    )
