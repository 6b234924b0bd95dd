"""Trains on this machine by torch, on one or several ranks.

Guarantees that weights to publish and to save are those after the step, whatever is trained meanwhile: they are copied
at once, or, in shared memory, left unchanged until a server has them.
"""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.abc import TaskGroup

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference.directory import open_configured_role
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import policy_version, vocabulary_of
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.backend import SavedStep, TrainedStep, TrainerBackend
from lachesis.pipeline.trainer.checkpoint import CheckpointContent
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.large_steps import LargeSteps
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.memory import raise_out_of_memory
from lachesis.pipeline.trainer.metrics import mismatch_of, step_figures
from lachesis.pipeline.trainer.numerics import numerics_of, with_microbatch, with_packing
from lachesis.pipeline.trainer.publication import COPY_ADVICE, PolicyPublisher
from lachesis.pipeline.trainer.ranks.leader import Leader, lead_ranks
from lachesis.pipeline.trainer.ranks.place import RankPlace, check_ranks, rank_device
from lachesis.pipeline.trainer.ranks.process_group import in_thread
from lachesis.pipeline.trainer.refused_policy import republish_refused
from lachesis.pipeline.trainer.resume import resume
from lachesis.pipeline.trainer.sequences import trainer_limits
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.pipeline.trainer.shared_weights import sharing_weights
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.pipeline.trainer.train_batch import TrainedBatch, train_batch
from lachesis.pipeline.weights.download import FETCHED, WeightsReceiver
from lachesis.schemas.errors import DataError

__all__ = ["open_torch"]

log = logging.getLogger("lachesis")

_MODEL_ADVICE = "a smaller model, training.lora = {}, or a device with more memory; see `lachesis plan`"
_LARGE_STEP_SHOWN_S = 60.0
_LONG_STEP_S = 5.0
"""Seconds after which a step that is still under way is shown."""


@asynccontextmanager
async def open_torch(service: Service, settings: TrainerSettings) -> AsyncIterator[TrainerBackend]:
    """Yield the back end of this process, which leads the ranks. Raises `ConfigError`."""
    training = settings.training
    place = RankPlace.of(training, os.environ)
    check_ranks(training, place.size)
    setting = rank_device(training, place, torch.cuda.device_count())
    device = prepare_device(setting, training.threads, deterministic=training.deterministic)
    log.info("computes on %s (training.device is %s)", device, training.device)
    async with lead_ranks(service, settings, place, device) as leader, background() as tasks:
        yield _TorchBackend(service, settings, leader, tasks)


class _TorchBackend:
    """See `TrainerBackend`."""

    name = "torch"

    _policy: PolicyModel
    _learner: Learner
    _feed: BatchFeed
    _publisher: PolicyPublisher

    def __init__(self, service: Service, settings: TrainerSettings, leader: Leader, tasks: TaskGroup) -> None:
        self._service = service
        self._settings = settings
        self._leader = leader
        self._tasks = tasks
        # a GPU's copies are in pinned memory, which takes long to get; others are freed once they are written
        self._pinned = HostCopies() if leader.device.type == "cuda" else None
        self._memory: str | None = None  # what was said of how steps are divided to fit into memory
        self._large_steps = LargeSteps()

    async def restore(self, feed: BatchFeed, lineage: str, checkpoint: tuple[Path, TrainerState] | None) -> None:
        settings, leader = self._settings, self._leader
        with raise_out_of_memory(leader.device, "the model with AdamW's moments", _MODEL_ADVICE):
            policy, learner = await resume(settings, checkpoint, leader.device)
            learner = await leader.join(policy, learner, feed)
            learner.inputs = load_inputs(settings.training.inputs, policy, learner.trained)
        self._policy, self._learner, self._feed, self._lineage = policy, learner, feed, lineage
        self._limits = trainer_limits(
            policy.tokenizer_hash, vocabulary_of(policy.model), settings.training.reads, settings.training.learner
        )
        self._numerics = msgspec.structs.replace(numerics_of(settings, learner.device), ranks=leader.ranks.size)

    async def step(self, batch: LedgerBatch) -> TrainedStep:
        await self._begin_batch(batch)
        try:
            async with background() as showing:
                showing.start_soon(self._show_progress, batch.batch.number + 1)
                trained = await in_thread(self._leader.ranks, self._train, batch)
        except DataError:
            self._learner.steps = batch.batch.number + 1
            raise
        metrics = trained.metrics
        self._report_large_step(metrics)
        self._report_memory(metrics)
        # a step that was too large but was taken, and is one of the first that a report has to name
        urgent = self._settings.training.learner.on_large_step == "warn" and self._large_steps.urgent
        mismatch = mismatch_of(metrics, trained.envs)
        return TrainedStep(trained.batch, trained.selected, step_figures(metrics, trained.tokens), mismatch, urgent)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        service, settings = self._service, self._settings
        self._publisher = PolicyPublisher(
            service,
            settings,
            self._feed,
            self._policy,
            self._tasks,
            lineage=self._lineage,
            vocabulary=self._limits.vocabulary,
        )
        async with background() as tasks:
            if settings.policy.url is not None:
                tasks.start_soon(_push_weights, service, settings)
            async with sharing_weights(service, settings, self._learner) as self._publisher.shared:
                tasks.start_soon(republish_refused, service, self._publisher.publish_again)
                yield

    async def publish(self, step: int) -> None:
        await self._publisher.publish(step)

    async def finish(self) -> None:
        await self._publisher.finish()

    async def save(self, step: int) -> SavedStep:
        await self._leader.gather_optimizer(self._learner)
        memory = self._pinned or HostCopies()
        with raise_out_of_memory(self._learner.device, "the copy of what a checkpoint holds", COPY_ADVICE):
            content = await anyio.to_thread.run_sync(CheckpointContent.of, self._policy, self._learner, memory)
        self._learner.gathered = None
        self._large_steps.mark_reported()
        version = partial(policy_version, step, self._lineage, content.weights)
        return SavedStep(content.nbytes, version, content.write, self._numerics)

    async def clean_up(self) -> None:
        """Do nothing: a checkpoint's folder holds all that it needs."""

    async def _begin_batch(self, batch: LedgerBatch) -> None:
        """Wait until all ranks have their share. Raises `InfrastructureError` where the service drains before."""
        begun = False
        self._service.set_note("ranks", "the other ranks fetch their shares of the batch")
        async with self._service.until_drained():
            await self._leader.begin_batch(batch)
            begun = True
        self._service.set_note("ranks", None)
        if not begun:
            raise InfrastructureError("drained while other ranks fetched their shares")

    async def _show_progress(self, step: int) -> None:
        """Say in the heartbeat, from `_LONG_STEP_S` on, how far the step under way has come. Runs until cancelled."""
        started_s = anyio.current_time()
        try:
            await anyio.sleep(_LONG_STEP_S)
            while True:
                seconds = anyio.current_time() - started_s
                passed = self._learner.passed  # read once: the step may end between two reads
                at = "" if passed is None else _place_in_step(*passed)
                self._service.set_note("step", f"step {step} takes {seconds:.0f} s so far{at}")
                await anyio.sleep(1)
        finally:
            self._service.set_note("step", None)

    def _train(self, batch: LedgerBatch) -> TrainedBatch:
        pad_id = self._policy.tokenizer.pad_token_id or 0
        return train_batch(
            self._learner,
            batch,
            self._limits,
            pad_id=pad_id,
            shuffle_seed=self._settings.shuffle_seed,
            deterministic=self._settings.training.deterministic,
        )

    def _report_large_step(self, metrics: StepMetrics) -> None:
        """Warn of the first of several steps that were too large, and raise a notice of each.

        The notice outlives the step, which may be over before a heartbeat.
        """
        note = metrics.large_step
        if note is not None:
            if not self._large_steps.large:
                log.warning("step %d: %s", metrics.step, note)
            self._service.set_problem("step", f"step {metrics.step}: {note}", for_s=_LARGE_STEP_SHOWN_S)
        self._large_steps.record(large=note is not None)

    def _report_memory(self, metrics: StepMetrics) -> None:
        """Warn when a step is divided more than the settings say, and record it, so that it can be repeated."""
        if metrics.memory is not None and metrics.memory != self._memory:
            log.warning("step %d: %s", metrics.step, metrics.memory)
        elif metrics.memory is None and self._memory is not None:
            log.info(
                "step %d: there is room again: micro-batches have %d tokens", metrics.step, metrics.microbatch_tokens
            )
        self._service.set_note("memory", metrics.memory)
        self._memory = metrics.memory
        self._numerics = with_microbatch(self._numerics, metrics.step - 1, metrics.microbatch_tokens)
        self._numerics = with_packing(self._numerics, packed=metrics.packed)


async def _push_weights(service: Service, settings: TrainerSettings) -> None:
    """Keep an external inference server (for example vLLM) on the newest weights."""
    async with open_configured_role(service.bus, settings.run, settings.policy_access) as directory:
        receiver = WeightsReceiver(service.bus, service.run, settings.folder / "weights" / FETCHED)
        follow = partial(follow_policy, path_of=receiver.path_of, max_behind=settings.max_staleness)
        await follow(service, directory, anyio.Event(), settings.training.name)


def _place_in_step(passed: int, with_present: int, sequences: int) -> str:
    """Return the end of a sentence that says how far a step has come. See `Learner.passed`."""
    if passed == with_present:
        return "; its sequences are through, and those of other ranks are computed"
    which = f"sequence {with_present}" if with_present == passed + 1 else f"sequences {passed + 1} to {with_present}"
    return f"; computes {which} of {sequences}"
