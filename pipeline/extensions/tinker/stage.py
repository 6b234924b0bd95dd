"""The trainer at Tinker as a service: one step a batch in ledger order, and checkpoints.

Guarantees, as those of the trainer here: a batch is trained in the order of the ledger and exactly once relative to the
weights, since a checkpoint names the state at Tinker and the ledger's position together; a step is reported as trained
only once its checkpoint is on disk; a trainer that starts again loads that state, whatever was trained at Tinker since,
and goes on under a new lineage. Unusable groups are dropped with reasons; a batch without a usable group is void. A
batch that Tinker refuses is void too; the trainer then begins again at its newest checkpoint. A state is deleted at
Tinker once no checkpoint names it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import tinker

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.training import open_trackers
from lachesis.pipeline.errors import AccessError, CheckpointError, InfrastructureError
from lachesis.pipeline.extensions.tinker.client import BatchRefusedError, TinkerClient, TinkerTrainer, open_client
from lachesis.pipeline.extensions.tinker.config import settings_of
from lachesis.pipeline.extensions.tinker.datums import datum_of
from lachesis.pipeline.extensions.tinker.figures import mismatch_of, tinker_figures
from lachesis.pipeline.extensions.tinker.key import read_key
from lachesis.pipeline.extensions.tinker.names import base_model_of, tokenizer_of
from lachesis.pipeline.extensions.tinker.saved_states import (
    TINKER_STATE,
    TinkerState,
    needed_states,
    read_tinker_state,
    record_state,
    write_saved_states,
)
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, STATE, TrainerState, latest_checkpoint
from lachesis.pipeline.ledger.checksums import verify_sums
from lachesis.pipeline.model.pretrained_tokenizer import load_tokenizer
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.runtime.incidents import follow_incidents
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.recorder import recording, traced
from lachesis.pipeline.trainer.checkpoint_folder import only_writer, write_checkpoint
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.metrics import latencies
from lachesis.pipeline.trainer.peer_metrics import PeerMetrics
from lachesis.pipeline.trainer.resume_checks import check_resumable, refuse_lost
from lachesis.pipeline.trainer.rolling_stats import BatchTimings, RollingTrainingStats
from lachesis.pipeline.trainer.samples import readable_samples
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.traces import step_trace, trace_step
from lachesis.pipeline.trainer.tracked_alerts import track_alerts
from lachesis.pipeline.trainer.tracking import Tracking, open_tracking
from lachesis.pipeline.trainer.train_loop import publish_with_retries, train_batches
from lachesis.pipeline.trainer.unreported_steps import UnreportedSteps
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.errors import ConfigError, DataError, SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import StepTimes
from lachesis.schemas.values import from_json

__all__ = ["run_tinker_trainer"]

log = logging.getLogger("lachesis")

_CHECKPOINT_BYTES = 1 << 16
_MAX_REFUSALS = 3
"""Batches in a row that Tinker may refuse: beyond, it is not the batches that are wrong."""


async def run_tinker_trainer(service: Service, config: RunConfig) -> None:
    """Train until the service drains or `training.steps` steps are done."""
    read_key(os.environ)  # before anything is waited for
    service.vitals.slots = 1
    try:
        with only_writer(config.path / CHECKPOINTS):
            async with (
                open_tracking(
                    config.path, config.training.sample_rows, list(open_trackers(config)), service.set_problem
                ) as tracking,
                open_client(settings_of(config), config.run) as client,
                background() as tasks,
            ):
                tasks.start_soon(follow_incidents, service)
                if tracking.tracks:
                    tasks.start_soon(track_alerts, service, config.path, config.health.webhook_from, tracking)
                refused: dict[int, str] = {}
                while not await _train(service, config, client, tracking, refused):
                    log.info("goes on from the newest checkpoint, without the batches that Tinker refused")
    except InfrastructureError:
        if not service.draining.is_set():
            raise
        log.warning(
            "drained while the bus or Tinker was unavailable: the next start continues from the newest checkpoint"
        )


async def _train(
    service: Service, config: RunConfig, client: TinkerClient, tracking: Tracking, refused: dict[int, str]
) -> bool:
    """Train from the newest checkpoint on, and return whether that is done.

    Where Tinker refuses a batch, it is added to `refused`, by its number with the reason, and there is more to do.
    """
    trainer = await _Trainer.restored(service, config, client, tracking, refused)
    await trainer.publish_policy()
    async with background() as tasks:
        tasks.start_soon(trainer.peer_metrics.listen, service)
        service.mark_ok()
        try:
            await trainer.train()
        except BatchRefusedError as error:
            number = trainer.steps
            refused[number] = str(error)
            if all(before in refused for before in range(number - _MAX_REFUSALS + 1, number + 1)):
                raise ConfigError(
                    f"Tinker refused {_MAX_REFUSALS} batches in a row, {number} the last of them: {error}; see "
                    "training.tinker in the configuration, and `lachesis verify` for the batches"
                ) from error
            return False
    return True


class _Trainer:
    def __init__(
        self,
        service: Service,
        config: RunConfig,
        *,
        client: TinkerClient,
        refused: Mapping[int, str],
        adapters: TinkerTrainer,
        steps: int,
        feed: BatchFeed,
        tracking: Tracking,
        limits: TrainerLimits,
    ) -> None:
        self.service = service
        self.config = config
        self.client = client
        self.refused = refused
        self.adapters = adapters
        self.steps = steps
        self.feed = feed
        self.tracking = tracking
        self.limits = limits
        self.lineage = os.urandom(3).hex()
        self.version = PolicyVersion(steps, self.lineage, "unpublished")
        self.unreported = UnreportedSteps(steps)
        self.peer_metrics = PeerMetrics()
        self.rolling = RollingTrainingStats()
        self.newest: LedgerBatch | None = None

    @classmethod
    async def restored(
        cls,
        service: Service,
        config: RunConfig,
        client: TinkerClient,
        tracking: Tracking,
        refused: Mapping[int, str],
    ) -> _Trainer:
        """Return a trainer at the newest checkpoint, or at the beginning.

        A checkpoint whose report was cut off is reported now. Raises as `check_resumable` and `refuse_lost`.
        """
        await service.starts_with("loading its newest checkpoint at Tinker, or making adapters")
        tokenizer = await anyio.to_thread.run_sync(load_tokenizer, tokenizer_of(config), config.chat_template)
        feed = await BatchFeed.open(service.bus, config.run, config.training.name, term=service.instance)
        folder = config.path / CHECKPOINTS
        path = latest_checkpoint(folder)
        base_model, rank = base_model_of(config), settings_of(config).rank
        state: TrainerState | None = None
        if path is None:
            refuse_lost(feed, folder)
            adapters = await client.start(base_model, rank)
        else:
            found, there = await anyio.to_thread.run_sync(_load, path)
            state = found
            await check_resumable(found, path, feed)
            if (there.base_model, there.rank) != (base_model, rank):
                raise CheckpointError(
                    f"{path} holds adapters of {there.base_model} of rank {there.rank}, but the configuration says "
                    f"{base_model} and {rank}: set training.tinker as it was, or start a new run"
                )
            feed.position = found.position
            adapters = await client.resume(there.state)
            log.info("resumed from %s at step %d", path.name, found.step)
        steps = 0 if state is None else state.step
        await tracking.resume(steps)
        limits = TrainerLimits(
            tokenizer_hash(tokenizer),
            len(tokenizer),
            temperature=config.trained_temperature,
            truncated=not config.training.learner.loss.mask_truncated,
        )
        trainer = cls(
            service,
            config,
            client=client,
            refused=refused,
            adapters=adapters,
            steps=steps,
            feed=feed,
            tracking=tracking,
            limits=limits,
        )
        if state is not None and path is not None and (feed.report is None or feed.report.step < state.step):
            trainer.unreported.voids, trainer.unreported.drops = list(state.voids), list(state.drops)
            await trainer.unreported.report(service, config.services.drain_s, feed, state, path)
        return trainer

    async def train(self) -> None:
        """Take batches, one ahead, until there is nothing more to do."""
        await train_batches(
            self.service, self.feed, step=self._step, save=self._save_new_steps, finished=self._finished
        )

    def _finished(self) -> bool:
        return self.config.training.steps is not None and self.steps >= self.config.training.steps

    async def _save_new_steps(self) -> None:
        if self.steps > self.unreported.checkpointed:
            await self._checkpoint()

    async def _step(self, batch: LedgerBatch) -> None:
        number = batch.batch.number
        if number != self.steps:
            raise CheckpointError(f"batch {number} follows step {self.steps}: checkpoint and ledger disagree")
        start_ns = self.service.now_ns()
        trace, span = step_trace(batch)
        void: str | None = None
        dropped: dict[int, str] = {}
        figures: dict[str, float] = {}
        with recording(self.service.tracing.clock, self.service.name, trace, span) as children:
            try:
                selected = self._select(batch)
            except DataError as error:
                void = str(error)
                self.unreported.record_void(number, error)
            else:
                dropped = selected.dropped
                self.unreported.record_drops(number, selected)
                figures = await self._train(selected, number)
            self.steps = number + 1
            self.feed.mark_trained(batch)
            self.newest = batch
            with traced("publish_weights"):
                await self.publish_policy()
        ended_ns = self.service.now_ns()
        trace_step(
            self.service, batch, (start_ns, ended_ns), children, void=void, dropped=dropped, teacher=False
        )  # fmt: skip
        self.unreported.times.append(StepTimes(number, start_ns, ended_ns))
        self.service.record_call(start_ns, batch.batch.sequences, failed=void is not None)
        stamps = batch.stamps(start_ns, ended_ns)
        trained = BatchTimings(stamps, batch.started_ns, ended_ns, batch.batch.sequences, batch.batch.tokens)
        self.rolling.record_batch(trained)
        figures |= {"train/time": ended_ns / 1e9} | latencies(trained) | self.rolling.figures()
        self.service.vitals.done(Stamp("trainer", batch.entry.written_ns, start_ns, ended_ns), len(batch.batch.groups))
        self.service.vitals.emitted += len(batch.batch.groups)
        figures |= self.service.tracing.figures()
        self.service.vitals.metrics = figures
        await self.tracking.log(self.peer_metrics.figures() | figures)
        if self.unreported.is_checkpoint_due(self.config.training, self.steps):
            await self._checkpoint()

    def _select(self, batch: LedgerBatch) -> TrainableBatch:
        """Return what can be trained of a batch. Raises `DataError` where nothing can."""
        if batch.batch.number in self.refused:
            raise DataError(self.refused[batch.batch.number])
        seed = self.config.seed if self.config.training.shuffle_advantages else None
        return batch.select(self.limits, shuffle_seed=seed)

    async def _train(self, selected: TrainableBatch, number: int) -> dict[str, float]:
        """Take the step at Tinker, and return its figures."""
        settings = settings_of(self.config)
        began = time.perf_counter()
        data = await anyio.to_thread.run_sync(lambda: [datum_of(sequence) for sequence in selected.sequences])
        adam = tinker.AdamParams(
            learning_rate=settings.learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            grad_clip_norm=settings.grad_clip,
        )
        forward, optimizer = await self.adapters.step(data, adam)
        env_of = {ref.group: ref.env for ref in selected.refs}
        envs = [env_of[sequence.group_id] for sequence in selected.sequences]
        mismatch = mismatch_of(selected.sequences, forward, envs)
        self.unreported.mismatches.append(mismatch)
        return {
            **tinker_figures(selected, forward, optimizer, mismatch, number),
            "train/learning_rate": settings.learning_rate,
            "train/seconds": time.perf_counter() - began,
            "train/dropped_groups": float(self.unreported.dropped),
        }

    async def publish_policy(self) -> None:
        """Save the weights for samplers, and make them the run's policy: its inference server follows."""
        name = f"{self.config.run}-{self.lineage}-{self.steps:08d}"
        path = await self.adapters.save_for_sampler(name, settings_of(self.config).sampler_ttl_s)
        digest = hashlib.sha256(f"{path} {name}".encode()).hexdigest()[:12]
        self.version = PolicyVersion(self.steps, self.lineage, digest)
        tokenizer, vocabulary = self.limits.tokenizer_hash or "", self.limits.vocabulary
        publish = partial(self.feed.publish_weights, self.version, path, tokenizer, vocabulary)
        await publish_with_retries(self.service, self.config.services.drain_s, "publish the policy", publish)
        self.service.mark_ok()

    async def _checkpoint(self) -> None:
        """Make the present step durable, then report it."""
        settings = self.config.training
        folder = self.config.path / CHECKPOINTS
        saved = await self.adapters.save(f"{self.config.run}-{self.lineage}-{self.steps:08d}")
        on_record = await anyio.to_thread.run_sync(record_state, folder, saved)
        there = TinkerState(state=saved, base_model=base_model_of(self.config), rank=settings_of(self.config).rank)
        state = TrainerState(
            step=self.steps,
            lineage=self.lineage,
            policy_version=str(self.version),
            ledger_position=self.feed.position.entries,
            chain_hash=self.feed.position.digest,
            unreported=list(range(self.unreported.checkpointed, self.steps)),
            voids=self.unreported.voids,
            drops=self.unreported.drops,
        )

        def write(partial_folder: Path) -> None:
            (partial_folder / TINKER_STATE).write_bytes(msgspec.json.format(msgspec.json.encode(there)))

        path = await write_when_room(
            folder,
            partial(write_checkpoint, folder, state, write, keep=settings.checkpoints_kept),
            needed_bytes=_CHECKPOINT_BYTES,
        )
        self.unreported.checkpointed = self.steps
        await self.unreported.report(self.service, self.config.services.drain_s, self.feed, state, path)
        await self._delete_needless_states(folder, on_record)
        if self.newest is not None:
            self.tracking.log_samples(readable_samples(self.newest.groups))

    async def _delete_needless_states(self, folder: Path, on_record: set[str]) -> None:
        """Delete at Tinker the states that no checkpoint names any more; what cannot be is left to the next call."""
        kept = await anyio.to_thread.run_sync(needed_states, folder)
        try:
            for path in sorted(on_record - kept):
                await self.client.delete(path)
                on_record = on_record - {path}
        except (AccessError, InfrastructureError) as error:
            log.warning("a saved state that is not needed stays until the next checkpoint: %s", error)
        await anyio.to_thread.run_sync(write_saved_states, folder, on_record)


def _load(path: Path) -> tuple[TrainerState, TinkerState]:
    """Return what a checkpoint holds. Raises `CheckpointError` where it is damaged, or another trainer's."""
    verify_sums(path)
    there = read_tinker_state(path)
    try:
        return from_json(STATE, TrainerState, read_small_file(path / STATE)), there
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error
