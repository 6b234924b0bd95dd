"""Trains at Tinker by its SDK: adapters and states there, checkpoints that name a state here.

Guarantees that a trainer that begins again loads the state that its checkpoint names, whatever was trained at Tinker
since; and that a state is deleted at Tinker once no checkpoint names it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
import msgspec
import tinker

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import AccessError, CheckpointError, InfrastructureError
from lachesis.pipeline.extensions.tinker.client import TinkerClient, TinkerTrainer, open_client
from lachesis.pipeline.extensions.tinker.config import settings_of
from lachesis.pipeline.extensions.tinker.datums import datum_of
from lachesis.pipeline.extensions.tinker.figures import mismatch_of, tinker_figures
from lachesis.pipeline.extensions.tinker.names import base_model_of, tokenizer_of
from lachesis.pipeline.extensions.tinker.saved_states import (
    TINKER_STATE,
    TinkerState,
    needed_states,
    read_saved_states,
    read_tinker_state,
    record_state,
    write_saved_states,
)
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.backend import SavedStep, TrainedStep, TrainerBackend
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.pipeline.trainer.train_loop import publish_with_retries
from lachesis.schemas.ids import PolicyVersion

__all__ = ["open_tinker"]

log = logging.getLogger("lachesis")

_CHECKPOINT_BYTES = 1 << 16


@asynccontextmanager
async def open_tinker(service: Service, settings: TrainerSettings, config: RunConfig) -> AsyncIterator[TrainerBackend]:
    """Yield the back end with a session of its own. Raises `StartupError` without a key."""
    async with open_client(settings_of(config), config.run) as client:
        yield _TinkerBackend(service, settings, config, client)


class _TinkerBackend:
    """See `TrainerBackend`."""

    name = "Tinker"

    _feed: BatchFeed
    _limits: TrainerLimits
    _adapters: TinkerTrainer
    _version: PolicyVersion

    def __init__(self, service: Service, settings: TrainerSettings, config: RunConfig, client: TinkerClient) -> None:
        self._service = service
        self._settings = settings
        self._config = config
        self._tinker = settings_of(config)
        self._client = client
        self._folder = settings.folder / CHECKPOINTS

    async def restore(self, feed: BatchFeed, lineage: str, checkpoint: tuple[Path, TrainerState] | None) -> None:
        config = self._config
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, tokenizer_of(config), config.chat_template)
        self._limits = TrainerLimits(
            tokenizer_hash(tokenizer),
            len(tokenizer),
            temperature=config.trained_temperature,
            truncated=not config.training.learner.loss.mask_truncated,
        )
        self._feed, self._lineage = feed, lineage
        self._base_model, rank = base_model_of(config), self._tinker.rank
        if checkpoint is None:
            self._adapters = await self._client.start(self._base_model, rank)
            return
        path, _ = checkpoint
        there = await anyio.to_thread.run_sync(read_tinker_state, path)
        if (there.base_model, there.rank) != (self._base_model, rank):
            raise CheckpointError(
                f"{path} holds adapters of {there.base_model} of rank {there.rank}, but the configuration says "
                f"{self._base_model} and {rank}: set training.tinker as it was, or start a new run"
            )
        self._adapters = await self._client.resume(there.state)

    async def step(self, batch: LedgerBatch) -> TrainedStep:
        settings = self._tinker
        selected = batch.select(self._limits, shuffle_seed=self._settings.shuffle_seed)
        began = time.perf_counter()
        data = await anyio.to_thread.run_sync(lambda: [datum_of(sequence) for sequence in selected.sequences])
        adam = tinker.AdamParams(
            learning_rate=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            grad_clip_norm=settings.grad_clip,
        )
        forward, optimizer = await self._adapters.step(data, adam)
        env_of = {ref.group: ref.env for ref in selected.refs}
        envs = [env_of[sequence.group_id] for sequence in selected.sequences]
        mismatch = mismatch_of(selected.sequences, forward, envs)
        figures = {
            **tinker_figures(selected, forward, optimizer, mismatch),
            "train/learning_rate": settings.learning_rate,
            "train/seconds": time.perf_counter() - began,
        }
        return TrainedStep(batch, selected, figures, mismatch)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Hold nothing: the weights are at Tinker."""
        yield

    async def publish(self, step: int) -> None:
        """Save the weights for samplers, and make them the run's policy: its inference server follows."""
        name = self._name(step)
        path = await self._adapters.save_for_sampler(name, self._tinker.sampler_ttl_s)
        digest = hashlib.sha256(f"{path} {name}".encode()).hexdigest()[:12]
        self._version = PolicyVersion(step, self._lineage, digest)
        tokenizer, vocabulary = self._limits.tokenizer_hash or "", self._limits.vocabulary
        publish = partial(self._feed.publish_weights, self._version, path, tokenizer, vocabulary)
        await publish_with_retries(self._service, self._settings.drain_s, "publish the policy", publish)
        self._service.mark_ok()

    async def finish(self) -> None:
        """Do nothing: `publish` returns once the policy is published."""

    async def save(self, step: int) -> SavedStep:
        """Save the state at Tinker, and put it on record before a checkpoint names it."""
        saved = await self._adapters.save(self._name(step))
        await anyio.to_thread.run_sync(record_state, self._folder, saved)
        there = TinkerState(state=saved, base_model=self._base_model, rank=self._tinker.rank)
        version = self._version

        def write(folder: Path) -> None:
            (folder / TINKER_STATE).write_bytes(msgspec.json.format(msgspec.json.encode(there)))

        return SavedStep(_CHECKPOINT_BYTES, lambda: version, write)

    async def clean_up(self) -> None:
        """Delete at Tinker the states that no checkpoint names any more; what cannot be is left to the next call."""
        on_record = await anyio.to_thread.run_sync(read_saved_states, self._folder)
        kept = await anyio.to_thread.run_sync(needed_states, self._folder)
        try:
            for path in sorted(on_record - kept):
                await self._client.delete(path)
                on_record = on_record - {path}
        except (AccessError, InfrastructureError) as error:
            log.warning("a saved state that is not needed stays until the next checkpoint: %s", error)
        await anyio.to_thread.run_sync(write_saved_states, self._folder, on_record)

    def _name(self, step: int) -> str:
        return f"{self._settings.run}-{self._lineage}-{step:08d}"
