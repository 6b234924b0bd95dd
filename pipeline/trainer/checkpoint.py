"""Checkpoints: all that a trainer needs to continue bit for bit, written crash-safe.

    <folder>/step-00000012/            an ordinary Hugging Face folder (config, model.safetensors, tokenizer) and
                 optimizer.safetensors AdamW's state and torch's random state
                 trainer.json          `TrainerState`
                 B3SUMS                of all of them, as `b3sum -c` reads it
    <folder>/latest                    the name of the newest complete checkpoint
    <folder>/best                      the name of the one with the best held-out rate, if that is known

Guarantees: `latest` only ever names a complete, synced folder (written elsewhere, synced, renamed, then the pointer is
replaced); `load_checkpoint` parses nothing in a folder that is not, byte for byte, what was written, and refuses
weights of another digest than that of the recorded policy version; no pickle.
One process writes a folder at a time; it holds `checkpoint_folder.only_writer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, save_policy
from lachesis.pipeline.model.tensors import matches, policy_tensors, policy_version
from lachesis.pipeline.trainer.adapters import adapter_tensors, load_checkpointed_model, save_adapters
from lachesis.pipeline.trainer.checkpoint_folder import read_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.gather import optimizer_state
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.ids import PolicyVersion

__all__ = ["Checkpoint", "CheckpointContent", "load_checkpoint"]

RANDOM_STATE = "random_state"


class Checkpoint(NamedTuple):
    """A loaded checkpoint, ready for the next step."""

    policy: PolicyModel
    learner: Learner
    state: TrainerState
    path: Path


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The content of a checkpoint after `step` steps; `policy` gives only the parts that no step changes."""

    policy: PolicyModel
    step: int
    weights: Mapping[str, torch.Tensor]
    adapters: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    """AdamW's state as `<parameter>/<entry>`, and torch's random state."""

    @classmethod
    def of(cls, policy: PolicyModel, learner: Learner, memory: HostCopies | None = None) -> CheckpointContent:
        """Return the content of a checkpoint of `learner`, whose model is the policy's.

        `memory`: for copies, so that training may go on; None: without copies. AdamW's state, where it was gathered
        from the ranks, is a copy already.
        """
        if learner.model is not policy.model:
            raise ValueError("the learner trains another model than the policy's.")
        parts = {
            "weights": policy_tensors(policy.model),
            "adapters": adapter_tensors(policy.model),
            "optimizer": _optimizer_tensors(learner),
        }
        if memory is not None:
            given = {part: named for part, named in parts.items() if part != "optimizer" or learner.gathered is None}
            flat = {f"{part}/{name}": tensor for part, named in given.items() for name, tensor in named.items()}
            copies = memory.copy(flat)
            parts |= {part: {name: copies[f"{part}/{name}"] for name in named} for part, named in given.items()}
        return cls(policy, learner.steps, **parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: nearly all that the checkpoint takes."""
        parts = (self.weights, self.adapters, self.optimizer)
        return sum(tensor.nbytes for part in parts for tensor in part.values())

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        save_policy(self.policy, folder, self.weights)
        save_adapters(self.policy.model, folder, self.adapters)
        save_file(dict(self.optimizer), folder / "optimizer.safetensors")


def load_checkpoint(
    path: str | Path,
    config: LearnerConfig,
    setup: ModelSetup | None = None,
    *,
    reference: Any = None,
    whole: TrainerState | None = None,
) -> Checkpoint:
    """Load a checkpoint folder and set torch's random state to the recorded one.

    `setup`: how the trainer sets up its model; None: all weights, on the CPU. `reference`: see `Learner`.
    `whole`: the state of a folder that `read_checkpoint` has found whole; None: it is read here.

    Raises CheckpointError when the folder is incomplete, damaged, or its weights are not those of its policy version.
    """
    path = Path(path)
    state = whole or read_checkpoint(path)
    try:
        recorded = PolicyVersion.parse(state.policy_version)
        tensors = load_file(path / "optimizer.safetensors")
        policy = load_checkpointed_model(path, setup or ModelSetup())
    except (OSError, SafetensorError, SchemaError, ConfigError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error
    held = policy_tensors(policy.model)
    if (recorded.step, recorded.lineage) != (state.step, state.lineage) or not matches(held, recorded):
        found = policy_version(state.step, state.lineage, held)
        raise CheckpointError(f"checkpoint {path} holds weights {found}, but records {state.policy_version}.")
    learner = Learner(policy.model, config, steps=state.step, reference=reference)
    _restore_optimizer(learner, tensors, path)
    return Checkpoint(policy, learner, state, path)


def _optimizer_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """AdamW's state as `<parameter>/<entry>`, and torch's random state."""
    tensors = {RANDOM_STATE: torch.get_rng_state()}
    for name, entries in optimizer_state(learner).items():
        for entry, value in entries.items():
            tensors[f"{name}/{entry}"] = value.contiguous()
    return tensors


def _restore_optimizer(learner: Learner, tensors: dict[str, torch.Tensor], path: Path) -> None:
    names = {name: parameter for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
    entries: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    random_state = tensors.pop(RANDOM_STATE, None)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        if name not in entries:
            raise CheckpointError(f"checkpoint {path}: optimizer state for {name!r}, which the model does not have.")
        entries[name][entry] = value
    incomplete = [name for name, found in entries.items() if found.keys() != {"step", "exp_avg", "exp_avg_sq"}]
    if random_state is None or (learner.steps and incomplete):
        raise CheckpointError(f"checkpoint {path}: optimizer state lacks {(incomplete or [RANDOM_STATE])[:5]}.")
    for name, parameter in names.items():
        for entry, value in entries[name].items():
            shape = torch.Size() if entry == "step" else parameter.shape
            if value.shape != shape or value.dtype != torch.float32 or not value.isfinite().all():
                raise CheckpointError(f"checkpoint {path}: {entry} of {name!r} has no values that an optimizer has.")
    try:
        torch.set_rng_state(random_state)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path}: its random state is none of torch's: {error}") from error
    for name, parameter in names.items():
        if entries[name]:
            # AdamW counts its steps on the CPU
            learner.optimizer.state[parameter] = {
                entry: value if entry == "step" else value.to(parameter.device)
                for entry, value in entries[name].items()
            }
