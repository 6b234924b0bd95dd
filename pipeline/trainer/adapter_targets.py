"""Checks that the modules of `training.lora.targets` can have adapters, before any is made.

Guarantees an error that names a target without a module, a tensor that two modules share, or a rank that no layer has.
peft ignores the first. With the second, only one of the two modules would change, and no server could take the merged
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.faults import some

__all__ = ["adapter_problem", "experts_without_adapter"]

log = logging.getLogger("lachesis")


def adapter_problem(model: Any, settings: LoraConfig) -> str | None:
    """Return which setting cannot be and why, None if adapters can be made."""
    modules = dict(model.named_modules())
    if settings.targets == "all-linear":
        head = getattr(model, "get_output_embeddings", lambda: None)()
        chosen = {name: one for name, one in modules.items() if _is_linear(one) and one is not head}
        if not chosen:
            return f"training.lora.targets: {type(model).__name__} has no linear layer; name its modules"
    else:
        by_target = {target: _matching(modules, target) for target in settings.targets}
        if not by_target:
            return "training.lora.targets is empty; name modules, or leave it out for every linear layer"
        lacking = [target for target, found in by_target.items() if not found]
        if lacking:
            known = sorted({name.rpartition(".")[2] for name, one in modules.items() if _is_adaptable(one)})
            return (
                f"training.lora.targets: no module of {type(model).__name__} is called {lacking[0]!r}"
                f"{nearest(lacking[0], known)}"
            )
        chosen = {name: one for found in by_target.values() for name, one in found.items()}
    return _shared(model, chosen) or _beyond_rank(chosen, settings)


def experts_without_adapter(adapted: Any) -> list[str]:
    """Return the parameters of several layers in one (experts) that have no adapter."""
    convolutions = {f"{name}.weight" for name, one in adapted.named_modules() if isinstance(one, torch.nn.Conv1d)}
    return [
        name.removeprefix("base_model.model.")
        for name, parameter in adapted.named_parameters()
        if parameter.dim() == 3 and not parameter.requires_grad and ".base_layer." not in name
        if name not in convolutions
    ]


def _matching(modules: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Return the modules that peft takes a target for: of that name, or with a path that ends in it."""
    return {name: one for name, one in modules.items() if name == target or name.endswith(f".{target}")}


def _is_linear(module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _is_adaptable(module: Any) -> bool:
    return _is_linear(module) or isinstance(module, torch.nn.Embedding | torch.nn.Conv2d)


def _shared(model: Any, chosen: Mapping[str, Any]) -> str | None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, module in chosen.items():
        weight = getattr(module, "weight", None)
        others = [one for one in names.get(id(weight), []) if one != f"{name}.weight"]
        if others:
            return (
                f"training.lora.targets: {name} shares its weights with {others[0].removesuffix('.weight')} "
                "(tie_word_embeddings), and an adapter would change one of the two alone, so that no server could take "
                "the merged weights: leave it out, or begin with a model whose two are apart"
            )
    return None


def _beyond_rank(chosen: Mapping[str, Any], settings: LoraConfig) -> str | None:
    sides = {name: min(one.weight.shape) for name, one in chosen.items() if getattr(one, "weight", None) is not None}
    beyond = {name: side for name, side in sides.items() if side < settings.rank}
    if not beyond:
        return None
    shown = some([f"{name} ({side})" for name, side in beyond.items()])
    if settings.targets == "all-linear" and len(beyond) < len(sides):
        log.warning(
            "training.lora.rank is %d, beyond the smaller side of %s: these have more numbers than their layer",
            settings.rank,
            shown,
        )
        return None
    return f"training.lora.rank is {settings.rank}, beyond the smaller side of {shown}: lower it"
