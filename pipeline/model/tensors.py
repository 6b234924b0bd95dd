"""A policy's named tensors: what belongs to it, its digest, and copying into a model.

Guarantees: `policy_tensors` names every stored tensor exactly once (tied weights under the name a checkpoint has), the
digest depends on names, dtypes, shapes and bytes alone, and `load_tensors` changes a model only after every name, shape
and dtype was found to match.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lachesis.pipeline.model.raw_weights import UNFIT
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "DIGEST_LENGTH",
    "check_coverage",
    "digest_in_order",
    "has_adapters",
    "load_tensors",
    "policy_tensors",
    "policy_version",
    "rounded",
    "vocabulary_of",
    "weights_digest",
    "widened",
]

_WRAPPED = re.compile(r"\.base_layer(?=\.|$)")
"""What peft puts into the name of a module that has an adapter."""
DIGEST_LENGTH = 12
"""Hex digits of the digest that a policy version carries."""


def policy_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model` by name, sorted, without copies.

    Of a model with adapters they are those of the model without, the adapters merged in (which takes copies). Tensors
    that share storage (tied embeddings) appear once, under the name that `save_pretrained` stores them by, which is the
    one that vLLM looks for; if neither is, under the one that sorts first.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    state = _merged(model) if has_adapters(model) else model.state_dict(keep_vars=False)
    for name, tensor in sorted(state.items(), key=lambda item: (item[0] in tied, item[0])):
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if identity in seen and tensor.numel():
            continue
        seen.add(identity)
        tensors[name] = tensor
    return dict(sorted(tensors.items()))


def rounded(tensors: Mapping[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors as they are published in `dtype`.

    bfloat16: wider floating-point ones are rounded to it. float32: all are as they are.
    """
    if dtype == "float32":
        return dict(tensors)
    return {
        name: tensor.detach().to(torch.bfloat16) if _is_wide(tensor) else tensor for name, tensor in tensors.items()
    }


def widened(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `rounded` tensors in the dtypes that are expected of them, which changes no value."""
    return {
        name: tensor.to(expected[name].dtype)
        if tensor.dtype == torch.bfloat16 and name in expected and _is_wide(expected[name])
        else tensor
        for name, tensor in tensors.items()
    }


def _is_wide(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > torch.bfloat16.itemsize


def has_adapters(model: Any) -> bool:
    """Return whether `model` is one with adapters, as peft makes them."""
    return hasattr(model, "get_base_model")


def _merged(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with adapters as they are when those are merged in, under the model's own names.

    An adapter is of a module's `weight`, or of another parameter, as those of experts are; a module with several such
    parameters is wrapped once for each.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    state = {_WRAPPED.sub("", name): tensor for name, tensor in base.state_dict().items() if ".lora_" not in name}
    with torch.no_grad():
        for name, module in base.named_modules():
            if isinstance(module, LoraLayer):
                parameter = getattr(module, "parameter_name", "weight")
                whole = getattr(module.get_base_layer(), parameter) + module.get_delta_weight("default")
                state[f"{_WRAPPED.sub('', name)}.{parameter}"] = whole
    return state


def vocabulary_of(model: Any) -> int | None:
    """Return how many token ids `model` knows.

    None for a model that does not say so as those of Hugging Face do.
    """
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    known = getattr(embeddings, "num_embeddings", None) or getattr(getattr(model, "config", None), "vocab_size", None)
    return known if isinstance(known, int) else None


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 (64 hex digits) over the name, dtype, shape and bytes of each tensor.

    Tensors are in the order of their names.
    """
    return digest_in_order(sorted(tensors.items()))


def digest_in_order(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the `weights_digest` of tensors that come one after the other, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def policy_version(step: int, lineage: str, tensors: Mapping[str, torch.Tensor]) -> PolicyVersion:
    """Return the version of these weights: optimizer step, training attempt, and digest.

    The digest has `DIGEST_LENGTH` digits.
    """
    return PolicyVersion(step, lineage, weights_digest(tensors)[:DIGEST_LENGTH])


def check_coverage(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise DataError unless `tensors` matches `expected` in names, shapes and dtypes, and is finite.

    The text names the tensors (at most five of each kind) and `where` they came from.
    """
    problems = []
    for what, names in (
        ("missing", sorted(expected.keys() - tensors.keys())),
        ("unknown", sorted(tensors.keys() - expected.keys())),
    ):
        if names:
            problems.append(f"{len(names)} {what}: {_some(names)}")
    unlike = [
        f"{name} is {_form(tensors[name])}, expected {_form(expected[name])}"
        for name in sorted(expected.keys() & tensors.keys())
        if _form(tensors[name]) != _form(expected[name])
    ]
    if unlike:
        problems.append(f"{len(unlike)} of another shape or dtype: {_some(unlike)}")
    infinite = [
        name for name, value in sorted(tensors.items()) if value.is_floating_point() and not value.isfinite().all()
    ]
    if infinite:
        problems.append(f"{len(infinite)} with values that are not finite: {_some(infinite)}")
    if problems:
        raise DataError(f"{where} {UNFIT}; nothing was loaded. Tensors " + "; ".join(problems))


def load_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into `model` in place, all of them or, with DataError, none."""
    targets = policy_tensors(model)
    check_coverage(tensors, targets, "the weights")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:5]) + (", ..." if len(items) > 5 else "")
