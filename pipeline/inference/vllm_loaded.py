"""Reads the weights that vLLM's model holds, by the names and shapes of its checkpoint. Pure.

vLLM joins some tensors of a checkpoint into one parameter (query, key and value) and pads others (the embedding). What
is read here are the parameters that it computes with, not what was sent to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lachesis.pipeline.model.tensors import weights_digest
from lachesis.schemas.errors import DataError

__all__ = ["loaded_digest", "loaded_tensors"]


def loaded_digest(model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of what `model` holds, in the dtypes of `expected`.

    It is that of the policy version that is served. A model that serves in half precision holds rounded weights, whose
    digest is another. Raises `DataError` naming the tensors that it holds in no form known here.
    """
    tensors = loaded_tensors(model, expected)
    if unknown := sorted(expected.keys() - tensors.keys()):
        raise DataError(
            f"vLLM holds {len(unknown)} tensors of the checkpoint in a form of its own, so the digest of its weights "
            f"is not known: {', '.join(unknown[:5])}"
        )
    return weights_digest({name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()})


def loaded_tensors(model: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
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
