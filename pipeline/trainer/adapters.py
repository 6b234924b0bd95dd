"""Low-rank adapters: added to a model, saved beside a checkpoint's whole weights, and put back.

The adapters are peft's. Guarantees that the same model, settings and seed give the same adapters, that torch's random
state stays as it was, and that adapters come back to the bit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.faults import some
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.tensors import has_adapters
from lachesis.pipeline.trainer.adapter_targets import adapter_problem, experts_without_adapter
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.values import from_json

__all__ = [
    "ADAPTER",
    "adapter_tensors",
    "load_checkpointed_model",
    "load_trainable_model",
    "save_adapters",
    "with_adapters",
]

log = logging.getLogger("lachesis")

ADAPTER = "adapter"
"""Folder of a checkpoint that holds its adapters, as peft writes them."""


class _Shape(msgspec.Struct, frozen=True):
    """The settings of adapters, as peft records them."""

    r: int
    lora_alpha: float


def load_trainable_model(path_or_hf_id: str | Path, setup: ModelSetup) -> PolicyModel:
    """Load a model as the trainer is to train it.

    With fresh adapters where the configuration asks for them.

    Fresh adapters change nothing that the model says. Raises `ConfigError` as `load_model` does, and where the model
    has no modules of the names that `training.lora.targets` gives.
    """
    policy = load_model(path_or_hf_id, setup)
    if setup.lora is None:
        return policy
    return policy._replace(model=with_adapters(policy.model, setup.lora, setup.seed).to(setup.device))


def with_adapters(model: Any, settings: LoraConfig, seed: int) -> Any:
    """Return `model` with fresh adapters. Raises `ConfigError` as `load_trainable_model`."""
    peft = _peft()
    if (problem := adapter_problem(model, settings)) is not None:
        raise ConfigError(problem)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        try:
            adapted = peft.get_peft_model(model, _peft_config(settings)).eval()
        except ValueError as error:
            raise ConfigError(f"training.lora.targets: {error}") from error
    trained, whole = adapted.get_nb_trainable_parameters()
    log.info("adapters of rank %d: %d of %d parameters are trained", settings.rank, trained, whole)
    if settings.targets == "all-linear" and (left := experts_without_adapter(adapted)):
        log.warning("these experts are no linear layers and have no adapter, so they stay as they are: %s", some(left))
    return adapted


def load_checkpointed_model(folder: Path, setup: ModelSetup) -> PolicyModel:
    """Load the model of a checkpoint folder, with the adapters that lie there.

    Raises `CheckpointError` when the checkpoint is of a trainer with other adapters, or with none.
    """
    if setup.lora is None and not (folder / ADAPTER).is_dir():
        return load_model(folder, setup)
    if setup.lora is None:
        raise CheckpointError(
            f"checkpoint {folder} is of a trainer with adapters: set training.lora as it was, or begin a new run with "
            "this folder as its `model`"
        )
    if not (folder / ADAPTER).is_dir():
        raise CheckpointError(
            f"checkpoint {folder} is of a trainer of all weights: leave training.lora out, or begin a new run with "
            "this folder as its `model`"
        )
    if setup.base is None:
        raise ConfigError("training.lora is set: `model` must name the model that the adapters belong to")
    policy = load_trainable_model(setup.base, setup)
    try:
        found = from_json("adapter_config.json", _Shape, read_small_file(folder / ADAPTER / "adapter_config.json"))
        alpha = setup.lora.rank if setup.lora.alpha is None else setup.lora.alpha
        if (found.r, found.lora_alpha) != (setup.lora.rank, alpha):
            raise CheckpointError(
                f"checkpoint {folder} has adapters of rank {found.r} and alpha {found.lora_alpha:g}, the configuration "
                f"says {setup.lora.rank} and {alpha:g}: set training.lora as it was, or begin a new run"
            )
        tensors = load_file(folder / ADAPTER / "adapter_model.safetensors")
        loaded = _peft().set_peft_model_state_dict(policy.model, tensors)
    except (OSError, SafetensorError, SchemaError, RuntimeError) as error:
        raise CheckpointError(f"the adapters of checkpoint {folder} cannot be loaded: {error}") from error
    missing = [name for name in loaded.missing_keys if "lora_" in name]
    if missing or loaded.unexpected_keys:
        raise CheckpointError(
            f"the adapters of checkpoint {folder} are of other modules than training.lora.targets names: "
            f"{', '.join([*missing, *loaded.unexpected_keys][:5])}"
        )
    return policy


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapters of `model`, by the model's own names; without adapters none."""
    if not has_adapters(model):
        return {}
    return {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}


def save_adapters(model: Any, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the adapters of `model`, if it has any: `tensors` are its `adapter_tensors`, or copies."""
    if has_adapters(model):
        model.save_pretrained(str(folder / ADAPTER), save_embedding_layers=False, state_dict=dict(tensors))


def _peft_config(settings: LoraConfig) -> Any:
    return _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.rank if settings.alpha is None else settings.alpha,
        target_modules=settings.targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings about peft's use of transformers, which cannot be fixed here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*(fan_in_fan_out|rank_pattern|alpha_pattern)")
        yield


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ConfigError(f"training.lora needs {error.name}; {install_command('lora')}") from error
    return peft
