"""Finds by a model's form whether its rows can be computed in one, and whether they can share tokens.

Both need a model in which only attention mixes the tokens of a row. The form does not show how the model is computed:
results have to be compared as well.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from lachesis.pipeline.model.packed_attention import attends_by

__all__ = ["why_no_trees", "why_padded_by_form"]

_MIXERS = re.compile(
    r"Mamba|SSM|R(?i:wkv)|Retention|Recurrent|Delta(Net|Rule)|Linear_?Attention|Lightning|ShortConv|LSTM|R(?i:glru)|Hyena"
)
"""Names of modules that carry something from token to token in another way than attention."""
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_ROPE_BY_LENGTH = ("'longrope'", "'dynamic'")
_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.RNNBase)


def why_padded_by_form(model: Any) -> str | None:
    """Return the part of a model's form that needs padded rows; None: none is known.

    The model may have no values.
    """
    return next(_needs_of_form(model.get_base_model() if hasattr(model, "get_base_model") else model), None)


def _needs_of_form(model: Any) -> Iterator[str]:
    name, kind, config = type(model).__name__, attends_by(model), model.config.get_text_config()
    if kind not in {"sdpa", "eager"}:
        yield f"the attention of {name} is {kind}"
    body = getattr(model, getattr(model, "base_model_prefix", "") or "-", None) or model
    if "position_ids" not in inspect.signature(body.forward).parameters:
        yield f"{name} takes no positions of tokens"
    for layer in sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS):
        yield f"{name} has layers of the kind {layer}"
    if any(rope in str(getattr(config, "rope_parameters", None)) for rope in _ROPE_BY_LENGTH):
        yield f"the positions of {name} depend on the longest row of a pass"
    for part, module in body.named_modules():
        if isinstance(module, _CONVOLUTIONS) or _MIXERS.search(type(module).__name__):
            yield f"{part} ({type(module).__name__}) of {name} carries something from token to token beside attention"
    if not model._can_set_attn_implementation():  # noqa: SLF001 - there is no public question
        yield f"{name} has an attention of its own, which knows padded rows alone"


def why_no_trees(model: Any) -> str | None:
    """Return why packed rows of the model cannot share tokens; None: they can.

    The model may have no values.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None):
        return f"{type(model).__name__} has windows or chunks of attention"
    return None
