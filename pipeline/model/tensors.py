"""A policy's named tensors: lists them, digests them, and copies them into a model.

Guarantees: `policy_tensors` names every stored tensor exactly once (tied weights under the name a checkpoint has), the
digest depends on names, dtypes, shapes and bytes alone, and `load_tensors` changes a model only after every name, shape
and dtype was found to match.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from lachesis.pipeline.model.digest import (
    DIGEST_LENGTH,
    Bytes,
    Piece,
    digest_in_order,
    label,
    on_threads,
    pieces_of,
)
from lachesis.pipeline.model.faults import some
from lachesis.pipeline.model.replace_tensors import CheckedTensors, replace_tensors
from lachesis.pipeline.model.safetensors_files import DTYPES, UNFIT, TensorForm, is_finite
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "bytes_of",
    "check_coverage",
    "check_forms",
    "form_text",
    "has_adapters",
    "is_wide",
    "load_tensors",
    "matches",
    "merged_tensors",
    "policy_tensors",
    "policy_version",
    "rounded",
    "tensor_form",
    "vocabulary_of",
    "weights_digest",
    "weights_digest_in_order",
    "widened",
]

_WRAPPED = re.compile(r"\.base_layer(?=\.|$)")
"""What peft puts into the name of a module that has an adapter."""
_CODES = {f"torch.{name}": code for code, (name, _) in DTYPES.items()}


def policy_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `model` by name, sorted, without copies.

    Of a model with adapters they are those of the model without, the adapters merged in (which takes copies). Tensors
    that share storage (tied embeddings) appear once, under the name that `save_pretrained` stores them by, which is the
    one that vLLM looks for; if neither is, under the one that sorts first.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    tied = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    state = merged_tensors(model) if has_adapters(model) else model.state_dict(keep_vars=False)
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
    return {name: tensor.detach().to(torch.bfloat16) if is_wide(tensor) else tensor for name, tensor in tensors.items()}


def widened(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `rounded` tensors in the dtypes that are expected of them, which changes no value."""
    return {
        name: tensor.to(expected[name].dtype)
        if tensor.dtype == torch.bfloat16 and name in expected and is_wide(expected[name])
        else tensor
        for name, tensor in tensors.items()
    }


def is_wide(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is rounded where weights travel in bfloat16."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > torch.bfloat16.itemsize


def has_adapters(model: Any) -> bool:
    """Return whether `model` is one with adapters, as peft makes them."""
    return hasattr(model, "get_base_model")


def merged_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with its adapters merged in, under the model's own names.

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


def tensor_form(name: str, tensor: torch.Tensor) -> TensorForm:
    """Return a tensor's name, dtype and shape as a weights file has them."""
    return TensorForm(name, _CODES[str(tensor.dtype)], tuple(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return a tensor's bytes: its own memory where it is contiguous and on the CPU, else a copy."""
    data: Bytes = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return data


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest over the name, dtype, shape and bytes of each tensor; see `digest`."""
    return weights_digest_in_order(sorted(tensors.items()))


def weights_digest_in_order(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the `weights_digest` of tensors that come one after the other, in the order of their names."""
    return digest_in_order(
        ((name, label(name, str(one.dtype), tuple(one.shape)), bytes_of(one)) for name, one in tensors)
    ).whole


def matches(tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> bool:
    """Return whether the tensors have the digest of `version`."""
    return bool(version.digest) and weights_digest(tensors).startswith(version.digest)


def policy_version(step: int, lineage: str, tensors: Mapping[str, torch.Tensor]) -> PolicyVersion:
    """Return the version of these weights: optimizer step, training attempt, and digest.

    The digest has `DIGEST_LENGTH` characters.
    """
    return PolicyVersion(step, lineage, weights_digest(tensors)[:DIGEST_LENGTH])


def check_coverage(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise DataError unless `tensors` matches `expected` in names, shapes and dtypes, and is finite.

    The text names the tensors (the first few of each kind) and `where` they came from.
    """
    check_forms(_texts(tensors), _texts(expected), _infinite(tensors), where)


def check_forms(found: Mapping[str, str], expected: Mapping[str, str], infinite: Collection[str], where: str) -> None:
    """Raise DataError as `check_coverage`: of tensors by their `form_text`, `infinite` ones named already."""
    problems = []
    for what, names in (
        ("missing", sorted(expected.keys() - found.keys())),
        ("unknown", sorted(found.keys() - expected.keys())),
    ):
        if names:
            problems.append(f"{len(names)} {what}: {some(names)}")
    unlike = [
        f"{name} is {found[name]}, expected {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if unlike:
        problems.append(f"{len(unlike)} of another shape or dtype: {some(unlike)}")
    if infinite:
        problems.append(f"{len(infinite)} with values that are not finite: {some(sorted(infinite))}")
    if problems:
        raise DataError(f"{where} {UNFIT}; nothing was loaded. Tensors " + "; ".join(problems))


def _texts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: form_text(one.dtype, one.shape) for name, one in tensors.items()}


def _infinite(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of tensors with values that are not finite; those on the CPU are read on several threads."""
    there = {name: one for name, one in tensors.items() if one.device.type != "cpu" or str(one.dtype) not in _CODES}
    here = {name: bytes_of(one) for name, one in tensors.items() if name not in there}

    def is_sound(piece: Piece) -> bool:
        return is_finite(here[piece.name][piece.start : piece.end], _CODES[str(tensors[piece.name].dtype)])

    pieces = [piece for name, data in here.items() for piece in pieces_of(name, data.size)]
    sound = on_threads(is_sound, pieces, sum(data.size for data in here.values()))
    found = {piece.name for piece, fine in zip(pieces, sound, strict=True) if not fine}
    return found | {name for name, one in there.items() if one.is_floating_point() and not one.isfinite().all()}


def load_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give `model` the values of `tensors`, all of them or, with DataError, none.

    `CheckedTensors` may become the model's own: nothing else is to use them afterwards.
    """
    targets = policy_tensors(model)
    infinite = () if isinstance(tensors, CheckedTensors) else _infinite(tensors)
    check_forms(_texts(tensors), _texts(targets), infinite, "the weights")
    replace_tensors(model, targets, tensors)


def form_text(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Return the form of a tensor as text, "float32[2, 3]"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
