"""Reads the weights that vLLM's model holds, by the names and shapes of its checkpoint. Pure.

vLLM joins some tensors of a checkpoint into one parameter (query, key and value) and pads others (the embedding). This
reads the parameters that vLLM computes with, not the tensors that were sent to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lachesis.pipeline.inference.protocol import LoadedWeights
from lachesis.pipeline.model.tensors import rounded, weights_digest_in_order

__all__ = ["digest_as_held", "loaded_weights"]


def loaded_weights(
    model: torch.nn.Module,
    expected: Mapping[str, torch.Tensor],
    dtype: str,
    as_held: str | None,
) -> LoadedWeights:
    """Return the report on the weights that `model` holds.

    `expected` has the names, shapes and dtypes of the checkpoint's tensors, in which they are digested. `dtype` is the
    dtype that they travelled in (`tensors.rounded`), `as_held` the `digest_as_held` of the delivered tensors.
    """
    held = _loaded_tensors(model, expected)
    if unknown := sorted(expected.keys() - held.keys()):
        return LoadedWeights(unknown=unknown)
    widened = ((name, tensor.detach().cpu().to(expected[name].dtype)) for name, tensor in sorted(held.items()))
    if as_held is not None:
        return LoadedWeights(digest=weights_digest_in_order(widened), rounded=as_held)
    as_sent = ((name, rounded({name: one}, dtype)[name]) for name, one in widened)
    return LoadedWeights(digest=weights_digest_in_order(as_sent))


def digest_as_held(model: torch.nn.Module, delivered: Mapping[str, torch.Tensor], dtype: str) -> str | None:
    """Return the digest of the delivered tensors, rounded to the dtypes in which `model` holds them.

    None if that changes no value: `model` holds them in their own dtypes, or in the one that they travelled in
    (`dtype`).
    """
    held = {name: tensor.dtype for name, tensor in _loaded_tensors(model, delivered).items()}
    harmless = {torch.bfloat16} if dtype == "bfloat16" else set()
    if all(held.get(name, tensor.dtype) in {tensor.dtype, *harmless} for name, tensor in delivered.items()):
        return None
    return weights_digest_in_order(
        ((name, tensor.to(held.get(name, tensor.dtype)).to(tensor.dtype)) for name, tensor in sorted(delivered.items()))
    )


def _loaded_tensors(model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a view of each tensor of `expected` that lies in a parameter or buffer of vLLM's model."""
    joined: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    found: dict[str, torch.Tensor] = {}
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        *path, module, kind = name.split(".")
        names = [".".join([*path, source, kind]) for source in joined.get(module, [module])]
        if not held.ndim or not all(part in expected and expected[part].ndim for part in names):
            continue
        lengths = [expected[part].shape[0] for part in names]
        same = all(expected[part].shape[1:] == held.shape[1:] for part in names)
        if same and sum(lengths) <= held.shape[0]:
            found |= zip(names, torch.split(held[: sum(lengths)], lengths), strict=True)
    return found
