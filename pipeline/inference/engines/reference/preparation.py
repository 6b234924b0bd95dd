"""Loads a model and makes the engine over it, in threads: each step takes seconds."""

from functools import partial
from typing import NamedTuple

import anyio.to_thread
import torch

from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.engines.reference.placement import forms_of, place
from lachesis.pipeline.model.end_tokens import end_tokens
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.tensors import policy_tensors, policy_version

__all__ = ["PreparedEngine", "prepare_engine"]


class PreparedEngine(NamedTuple):
    """A loaded policy, an engine over it that is yet to be entered, and what an application over both has to know."""

    policy: PolicyModel
    engine: Engine
    forms: dict[str, torch.Tensor]
    """Names, shapes and dtypes of the weights as loaded."""
    device: torch.device


async def prepare_engine(
    model: str, setup: ModelSetup, config: InferenceConfig, *, role: str, lineage: str
) -> PreparedEngine:
    """Return the engine of `model`, a folder or a Hugging Face id, placed as `config` says.

    `lineage`: that of the weights' version until others are loaded. Raises ConfigError when it cannot be loaded.
    """
    policy = await anyio.to_thread.run_sync(partial(load_model, model, setup))
    version = await anyio.to_thread.run_sync(lambda: policy_version(0, lineage, policy_tensors(policy.model)))
    forms = forms_of(policy.model)  # before it is placed: that may change dtypes
    device = await anyio.to_thread.run_sync(partial(place, policy, config, role))
    making = partial(
        Engine,
        policy.model,
        eos_token_id=end_tokens(policy.model, policy.tokenizer),
        weight_version=str(version),
        config=config.engine,
        decode=policy.tokenizer.decode,
    )
    return PreparedEngine(policy, await anyio.to_thread.run_sync(making), forms, device)
