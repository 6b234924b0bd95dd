"""The policy model: made locally, or loaded from a folder or a Hugging Face id.

Given a seed, or a path or id, it returns a `PolicyModel` (model in float32 in evaluation mode, tokenizer, tokenizer
hash). Saved folders are ordinary Hugging Face folders: `AutoModelForCausalLM.from_pretrained` and
`AutoTokenizer.from_pretrained` load them, and no custom code travels with them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from lachesis.pipeline.model.completeness import add_loading_faults, add_tokenizer_faults, add_value_faults
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.faults import ModelFaults
from lachesis.pipeline.model.pretrained_tokenizer import find_named, load_tokenizer, tokenizer_from
from lachesis.pipeline.model.source import ModelSource, cannot_load, read_config, stored_folder
from lachesis.pipeline.model.tensors import has_adapters, policy_tensors, vocabulary_of
from lachesis.pipeline.model.tokenizer import build_character_tokenizer, save_tokenizer, tokenizer_hash
from lachesis.pipeline.model.weight_headers import check_weight_files
from lachesis.schemas.errors import ConfigError

disable_progress_bar()  # the output of a service is its log
logging.getLogger("transformers.modeling_utils").addFilter(  # what it says of tensors is a fault here, or no news
    lambda record: "LOAD REPORT" not in record.getMessage()
)

__all__ = [
    "ModelSetup",
    "PolicyModel",
    "build_tiny_policy",
    "find_with_tokenizer",
    "load_files",
    "load_model",
    "save_policy",
]


_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """How a model is set up for a trainer."""

    device: torch.device = _CPU
    """Where its weights go."""
    attention: str = "auto"
    """See `training.attention`."""
    lora: LoraConfig | None = None
    """The adapters that are trained; None: all weights."""
    base: str | None = None
    """The model that the run began with: adapters belong to its weights."""
    seed: int = 0
    """Seed of fresh adapters."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; None: it lies beside the weights."""
    chat_template: str | None = None
    """File or text of a chat template; None: the one beside the tokenizer."""
    images: bool = False
    """Whether the model is to take images: it is loaded whole, and its image processor with it."""
    exceptions: tuple[str, ...] = ()
    """See `model_exceptions`."""


class PolicyModel(NamedTuple):
    """A causal language model with the tokenizer that belongs to it."""

    model: Any
    """`PreTrainedModel` with a causal head, float32, evaluation mode (no dropout: the learner differentiates exactly
    what the rollout sampled from)."""
    tokenizer: Any
    """`PreTrainedTokenizerFast` with a chat template."""
    tokenizer_hash: str
    """SHA-256 in hex of tokenizer and chat template; rollouts carry it."""
    image_processor: Any = None
    """Of a model that was loaded to take images."""


def build_tiny_policy(
    seed: int,
    *,
    phrases: Iterable[str] = (),
    width: int = 96,
    layers: int = 3,
    heads: int = 4,
    max_length: int = 128,
) -> PolicyModel:
    """Return a randomly initialised character-level Llama.

    It has about 0.4 million parameters at the default sizes.

    The global random state of torch is left as it was, so that callers can make a model anywhere.
    `phrases`: strings that get one token each (see `build_character_tokenizer`).
    `max_length`: context in tokens (prompt and completion together).
    """
    tokenizer = build_character_tokenizer(max_length=max_length, phrases=phrases)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return PolicyModel(model.eval(), tokenizer, tokenizer_hash(tokenizer))


def save_policy(policy: PolicyModel, folder: str | Path, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write model (safetensors), configuration and tokenizer with its chat template into `folder`.

    `tensors`: copies of the model's `policy_tensors` to write in their place; None: as they are. Of a model with
    adapters the whole weights are written, the adapters merged in.
    """
    model = policy.model.get_base_model() if has_adapters(policy.model) else policy.model
    model.save_pretrained(folder, state_dict=dict(tensors or policy_tensors(policy.model)))
    save_tokenizer(policy.tokenizer, folder)
    if policy.image_processor is not None:
        policy.image_processor.save_pretrained(folder)


def load_model(path_or_hf_id: str | Path, setup: ModelSetup | None = None) -> PolicyModel:
    """Load a causal model and its tokenizer in float32 from a local folder or by Hugging Face id.

    `setup`: device and attention; its adapters are not added here. None: the CPU.

    Weights come from safetensors alone, and no code that lies beside them is run.
    Raises ConfigError when nothing can be loaded, or when the tokenizer is slow or lacks a chat template or an
    end-of-sequence token; and for a model that is incomplete or wrong, with the names of its tensors (`ModelFaults`).
    A name that is neither a folder nor on the hub is refused within seconds.
    """
    setup = setup or ModelSetup()
    source, tokenizer = find_with_tokenizer(str(path_or_hf_id), setup)
    faults = ModelFaults(setup.exceptions)
    try:
        model, info = load_files(source, setup)
        processor = None
        if setup.images:
            processor = AutoImageProcessor.from_pretrained(
                source.name, trust_remote_code=False, local_files_only=source.local_files_only
            )
    except Exception as error:  # transformers raises whatever its parsing of a damaged folder runs into
        raise cannot_load(source.name, error) from error
    _add_faults(faults, source, model, info, setup)
    if (rows := vocabulary_of(model)) is not None:
        add_tokenizer_faults(faults, tokenizer, rows)
    if (problem := faults.text(source.name)) is not None:
        raise ConfigError(f"model {source.name!r} is incomplete or wrong: {problem}")
    return PolicyModel(model.eval().to(setup.device), tokenizer, tokenizer_hash(tokenizer), processor)


def find_with_tokenizer(name: str, setup: ModelSetup) -> tuple[ModelSource, Any]:
    """Return where a model lies, and the tokenizer with the chat template that `setup` gives it.

    Raises ConfigError as `load_model`.
    """
    own, template = setup.tokenizer is None, setup.chat_template
    source = find_named(name, tokenizer=own, template=template is None, exceptions=setup.exceptions)
    return source, tokenizer_from(source, template) if own else load_tokenizer(str(setup.tokenizer), template)


def load_files(source: ModelSource, setup: ModelSetup, device_map: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the model and what transformers says of its tensors.

    What is missing is drawn at random, in every process the same. With `device_map` "meta" it has no values, and none
    are read.
    """
    kind = AutoModelForImageTextToText if setup.images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, info = kind.from_pretrained(
            source.name,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=source.local_files_only,
            attn_implementation=None if setup.attention == "auto" else setup.attention,
            ignore_mismatched_sizes=True,  # they are faults, by name
            output_loading_info=True,
            device_map=device_map,
        )
    return model, info


def _add_faults(faults: ModelFaults, source: ModelSource, model: Any, info: dict[str, Any], setup: ModelSetup) -> None:
    """Add what is wrong with a model's tensors. Those of a local folder were looked at in its files already."""
    folder = stored_folder(source.name)
    config = {} if folder is None else read_config(folder)
    if folder is not None and not Path(source.name).is_dir():
        check_weight_files(folder, config, setup.exceptions)
    add_loading_faults(faults, model, info, config, images=setup.images)
    add_value_faults(faults, model)
