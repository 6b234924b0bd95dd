"""Loads what torch trains: a checkpoint, or the model that the run begins with."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch

from lachesis.pipeline.inference.policy_context import context_of_server
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.model.context import check_positions
from lachesis.pipeline.model.policy import ModelSetup, PolicyModel, load_model
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.trainer.adapters import load_trainable_model
from lachesis.pipeline.trainer.checkpoint import Checkpoint, load_checkpoint
from lachesis.pipeline.trainer.config import learner_on_record
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.model_setup import model_setup
from lachesis.pipeline.trainer.numerics import microbatch_at
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.schemas.errors import ConfigError

__all__ = ["load_reference", "resume"]

log = logging.getLogger("lachesis")


async def resume(
    settings: TrainerSettings, checkpoint: tuple[Path, TrainerState] | None, device: torch.device
) -> tuple[PolicyModel, Learner]:
    """Return what to train, on `device`, from a checkpoint, or from the model that the run begins with.

    Raises `CheckpointError` when the checkpoint cannot be loaded, and `ConfigError` when the model cannot be trained on
    all that it may sample.
    """
    setup = model_setup(settings, device)
    reference = await anyio.to_thread.run_sync(load_reference, settings, setup)
    if settings.training.sharding == "full":  # whole where memory is plenty; the device gets its share
        setup = replace(setup, device=torch.device("cpu"))
    if checkpoint is not None:
        path, state = checkpoint
        setup = await anyio.to_thread.run_sync(_with_tokenizer_of_model, settings, setup)
        load = partial(load_checkpoint, path, settings.training.learner, setup, reference=reference, whole=state)
        loaded = await anyio.to_thread.run_sync(load)
        check_positions(context_of_server(settings.policy, settings.model), loaded.policy.model.config)
        _keep_fit(loaded)
        return loaded.policy, loaded.learner
    if settings.model is None:
        raise ConfigError("model: not set; name a local folder or a Hugging Face id")
    policy = await anyio.to_thread.run_sync(partial(load_trainable_model, settings.model, setup))
    check_positions(context_of_server(settings.policy, settings.model), policy.model.config)
    return policy, Learner(policy.model, settings.training.learner, reference=reference)


def _with_tokenizer_of_model(settings: TrainerSettings, setup: ModelSetup) -> ModelSetup:
    """Return a setup with the tokenizer beside `model`, as the inference servers have it.

    The one in a checkpoint has the chat template of its time, which may have been changed since.
    """
    if settings.model is None or setup.tokenizer is not None:
        return setup
    try:
        load_tokenizer(settings.model, settings.chat_template)
    except ConfigError as error:
        log.info("takes the tokenizer of the checkpoint, since that of the model cannot be loaded: %s", error)
        return setup
    return replace(setup, tokenizer=settings.model)


def _keep_fit(checkpoint: Checkpoint) -> None:
    """Begin with micro-batches that fitted into memory before, if what the settings allow is the same."""
    numerics, learner = checkpoint.state.numerics, checkpoint.learner
    if numerics is None:
        return
    device = learner.device.type
    allowed = learner_on_record(numerics.learner.encode()).microbatch_tokens(device)
    if allowed == learner.config.microbatch_tokens(device):
        learner.fit = learner.fit.beginning_with(microbatch_at(numerics, learner.steps), device)


def load_reference(settings: TrainerSettings, setup: ModelSetup) -> Any:
    """Return the model that the run began with, if the loss keeps the policy near to it; else None.

    Adapters need none: without them the policy is that model.

    Raises `ConfigError` when the configuration names no model, or one that cannot be loaded.
    """
    if not settings.training.learner.loss.kl_coef or setup.lora is not None:
        return None
    if settings.model is None:
        raise ConfigError(
            "training.learner.loss.kl_coef is set, so `model` must name the model that the run began with"
        )
    return load_model(settings.model, setup).model.requires_grad_(False)
