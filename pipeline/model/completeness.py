"""Compares a model that transformers has loaded with what its files and its configuration describe.

transformers draws missing tensors at random, ignores unknown ones and casts the others; it says so only in a log.
Guarantees that each such tensor is a fault here, and so is a value that is not finite. Values are read once, which
takes as long as a copy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from lachesis.pipeline.model.faults import TOKENIZER, ModelFaults, is_spare, some

__all__ = [
    "add_faults_of_values",
    "add_loading_faults",
    "add_tied_fault",
    "add_tokenizer_faults",
    "add_value_faults",
    "tied_pairs",
]

_CHUNK = 1 << 24
"""Elements that are looked at together."""
_MAY_BE_ZERO = re.compile(
    r"bias|lora_B|lora_embedding_A|norm|scale|position|wpe|mm_input_projection|(^|\.)(gate|router|\w*init)(\.|$)",
    re.IGNORECASE,
)
"""Parts of the names of tensors of two dimensions that models begin with as zeros."""
_PLACEHOLDER = ("image", "img", "audio", "video", "vision", "soft_token")
"""Parts of the names of tokens that stand for pictures or sounds: a model of text has no rows for them."""


def add_loading_faults(
    faults: ModelFaults, model: Any, info: Mapping[str, Any], config: Mapping[str, Any], *, images: bool = False
) -> None:
    """Add what `from_pretrained` said with `output_loading_info`.

    Also weights that are tied against the files' word.

    `config`: what config.json says. `images`: whether the model is to take images.
    """
    head = _head_name(model)
    hint = " (if it is the embedding, set tie_word_embeddings = true in config.json)"
    for name in sorted(info["missing_keys"]):
        if not is_spare(name, config, images=images):
            faults.add("missing tensors", name, hint if name == head else "")
    for name, stored, wanted in sorted(info["mismatched_keys"]):
        faults.add("mis-shaped tensors", name, f" is {list(stored)}, by config.json {list(wanted)}")
    for name in sorted(info["unexpected_keys"]):
        if not is_spare(name, config, images=images):
            faults.add("unexpected tensors", name)
    for target, source in tied_pairs(model).items():
        if not _is_one(model, target, source):
            add_tied_fault(faults, target, source)


def add_tied_fault(faults: ModelFaults, target: str, source: str) -> None:
    """Add two tensors that the configuration ties and the files hold apart."""
    text = f" differs from {source}, and tie_word_embeddings in config.json says that they are one"
    faults.add("tied tensors that differ", target, text)


def tied_pairs(model: Any) -> dict[str, str]:
    """Return the names of tensors that the configuration makes one with another: target to source."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    found: dict[str, str] = {} if expanded is None else expanded(all_submodels=True)
    return found


def add_value_faults(faults: ModelFaults, model: Any) -> None:
    """Add the tensors that hold NaN or infinity, and matrices that hold nothing but zeros."""
    add_faults_of_values(faults, _once_each(model.state_dict()))


def add_faults_of_values(faults: ModelFaults, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As `add_value_faults`, for tensors that come one after the other.

    A file whose download broke off holds zeros where its room was taken in advance. Single matrices of zeros are no
    fault where models begin with them: biases, gates, scales, position embeddings, the second half of an adapter.
    """
    empty = []
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = _range(tensor)
        if not (math.isfinite(low) and math.isfinite(high)):
            faults.add("non-finite tensors", name)
        if low == high == 0 and sum(size > 1 for size in tensor.shape) > 1 and not _MAY_BE_ZERO.search(name):
            empty.append(name)
    faults.add_names("tensors of nothing but zeros", empty)


def add_tokenizer_faults(faults: ModelFaults, tokenizer: Any, rows: int) -> None:
    """Add a tokenizer with tokens that a model of so many token ids does not know."""
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    special = set(tokenizer.all_special_tokens) | set(map(str, tokenizer.added_tokens_decoder.values()))
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    foreign = [
        token
        for number, token in beyond
        if number in ends or token not in special or not any(part in token.lower() for part in _PLACEHOLDER)
    ]
    if foreign:
        unknown = some([repr(token) for token in foreign])
        text = (
            f" has {len(tokenizer)} tokens, the model knows {rows}: choose the tokenizer that it was trained with, or "
            f"give it more rows (resize_token_embeddings). It does not know {unknown}"
        )
        faults.add("more tokens than the model has", TOKENIZER, text)


def _head_name(model: Any) -> str | None:
    """Return the name of the tensor that makes logits; None if the model does not say."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = (name for name, module in model.named_modules() if module is head)
    return next((f"{name}.weight" for name in found), None)


def _is_one(model: Any, target: str, source: str) -> bool:
    """Return whether two tensors are one; True without weights, when that is unknown."""
    first, second = model.get_parameter(target), model.get_parameter(source)
    return first is second or first.is_meta or first.data_ptr() == second.data_ptr()


def _once_each(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield name, tensor


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest value; what is not finite ends up there."""
    flat = tensor.detach().reshape(-1)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))
    # torch finds no extremes of floats of one byte, which the files of an excepted quantized model hold
    parts = [torch.aminmax(chunk.float() if chunk.itemsize == 1 else chunk) for chunk in chunks]
    return (
        float(torch.stack([low for low, _ in parts]).min()),
        float(torch.stack([high for _, high in parts]).max()),
    )
