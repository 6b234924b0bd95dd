"""The trainer as a service: one optimizer step a batch in ledger order, weights, checkpoints.

Guarantees: a batch is trained in the order of the ledger and exactly once relative to the weights, since the checkpoint
holds weights, optimizer and ledger position together; a step is reported as trained only once a checkpoint that
contains it is on disk. Weights and checkpoints are copied after a step; they are stored, announced and reported while
the next ones are taken, one at a time, and all of them before the trainer ends. A trainer that starts again goes on
from its newest checkpoint under a new lineage, so two different weights never share a policy version. A group that
cannot be used is dropped, with its reason in checkpoint and report, and the others of its batch are trained; after a
crash they are the same ones. A batch without any usable group is reported void and its step is counted.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.abc import TaskGroup

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.errors import CheckpointError, HistoryLostError, InfrastructureError, leaves
from lachesis.pipeline.evaluator.read import EvaluationReader
from lachesis.pipeline.inference.directory import open_configured_role
from lachesis.pipeline.inference.policy_follower import follow_policy
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint, point_to_best
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import vocabulary_of
from lachesis.pipeline.runtime.incidents import follow_incidents
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.recorder import recording, traced
from lachesis.pipeline.trainer.checkpoint import CheckpointContent, save_content
from lachesis.pipeline.trainer.checkpoint_folder import only_writer
from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.pipeline.trainer.distance_by_env import env_figures
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.large_steps import LargeSteps
from lachesis.pipeline.trainer.last_evaluation import last_evaluation
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.memory import told_as_out_of_memory
from lachesis.pipeline.trainer.metrics import latencies, mismatch_of, step_figures
from lachesis.pipeline.trainer.numerics import numerics_of, with_microbatch, with_packing
from lachesis.pipeline.trainer.one_at_a_time import OneAtATime
from lachesis.pipeline.trainer.peer_metrics import PeerMetrics
from lachesis.pipeline.trainer.publication import COPY_ADVICE, PolicyPublisher
from lachesis.pipeline.trainer.ranks.leader import Leader, lead_ranks
from lachesis.pipeline.trainer.ranks.place import RankPlace, check_ranks, rank_device
from lachesis.pipeline.trainer.ranks.process_group import in_thread
from lachesis.pipeline.trainer.refused_policy import republish_refused
from lachesis.pipeline.trainer.resume import resume
from lachesis.pipeline.trainer.rolling_stats import BatchTimings, RollingTrainingStats
from lachesis.pipeline.trainer.samples import readable_samples
from lachesis.pipeline.trainer.sequences import trainer_limits
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.pipeline.trainer.shared_weights import sharing_weights
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.pipeline.trainer.traces import step_trace, trace_step
from lachesis.pipeline.trainer.tracked_alerts import track_alerts
from lachesis.pipeline.trainer.tracking import Tracking, open_tracking
from lachesis.pipeline.trainer.train_batch import TrainedBatch, train_batch
from lachesis.pipeline.trainer.train_loop import train_batches
from lachesis.pipeline.trainer.unreported_steps import UnreportedSteps
from lachesis.pipeline.weights.download import FETCHED, WeightsReceiver
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import LedgerEntry, StepTimes

__all__ = ["OfflineRun", "run_trainer"]

log = logging.getLogger("lachesis")

_EVALUATIONS_S = 5.0
"""Seconds that a checkpoint may wait for what evaluations there are."""
_MODEL_ADVICE = "a smaller model, training.lora = {}, or a device with more memory; see `lachesis plan`"
_LARGE_STEP_SHOWN_S = 60.0
_SLOW_STEPS = 20
_MAX_SLOW_REPORTED = 5
"""Rollouts that the heartbeat names: the slowest over that many steps."""


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """An offline trainer: its ledger is complete, and its weights are not published.

    `past` says what staleness is counted from. `trained` is called with each step once it is done, `durable` with the
    entry of the last batch in a checkpoint.
    """

    past: OfflineStart
    trained: Callable[[int], None]
    durable: Callable[[LedgerEntry], None]


async def run_trainer(service: Service, settings: TrainerSettings, on_past: OfflineRun | None = None) -> None:
    """Train until the service drains or `training.steps` steps are done."""
    service.vitals.slots = 1
    place = _place(settings.training, on_past)
    training = settings.training
    setting = rank_device(training, place, torch.cuda.device_count())
    device = prepare_device(setting, training.threads, deterministic=training.deterministic)
    log.info("computes on %s (training.device is %s)", device, training.device)
    try:
        folder = settings.folder
        name = settings.run if on_past is None else f"{settings.run}-{training.name}"
        with only_writer(folder / CHECKPOINTS):
            async with (
                open_tracking(
                    folder, training.sample_rows, list(settings.trackers(name)), service.set_problem
                ) as tracking,
                lead_ranks(service, settings, place, device) as leader,
                background() as tasks,
            ):
                with told_as_out_of_memory(device, "the model with AdamW's moments", _MODEL_ADVICE):
                    trainer = await _Trainer.restored(
                        service, settings, leader, tracking=tracking, tasks=tasks, on_past=on_past
                    )
                tasks.start_soon(_tell_drain, service, settings.training.drain_s)
                if on_past is not None:
                    service.mark_ok()
                    await trainer.train()
                    return
                if settings.policy.url is not None:
                    tasks.start_soon(_push_weights, service, settings)
                async with sharing_weights(service, settings, trainer.learner) as trainer.publisher.shared:
                    await trainer.publisher.publish(trainer.learner.steps)
                    await trainer.publisher.finish()
                    tasks.start_soon(trainer.peer_metrics.listen, service)
                    tasks.start_soon(republish_refused, service, trainer.publisher.publish_again)
                    tasks.start_soon(follow_incidents, service)
                    if tracking.tracks:
                        tasks.start_soon(track_alerts, service, folder, settings.alerts_from, tracking)
                    service.mark_ok()
                    await trainer.train()
                    await trainer.log_last_evaluation()
    except (InfrastructureError, BaseExceptionGroup) as error:
        away = all(isinstance(leaf, InfrastructureError) for leaf in leaves(error))
        if not (away and service.draining.is_set()):
            raise
        log.warning("drained while the bus was unavailable: the next start continues from the newest checkpoint")


def _place(training: TrainingConfig, on_past: OfflineRun | None) -> RankPlace:
    """Return that of this process among the trainer's ranks. Raises `ConfigError` for what does not go together."""
    place = RankPlace.of(training, os.environ)
    check_ranks(training, place.size)
    if on_past is not None and place.size > 1:
        raise ConfigError(f"training.ranks is {place.size}, but an offline trainer is one process: set it to 1")
    return place


async def _tell_drain(service: Service, drain_s: float) -> None:
    """Say what a drain waits for: a step runs in a thread, which cannot be cut short."""
    await service.draining.wait()
    service.set_note("drain", f"finishing its step and writing a checkpoint, for {drain_s:g} s at most")
    log.info("draining: %s", service.vitals.status_text)


async def _push_weights(service: Service, settings: TrainerSettings) -> None:
    """Keep an external inference server (for example vLLM) on the newest weights."""
    async with open_configured_role(service.bus, settings.run, settings.policy_access) as directory:
        receiver = WeightsReceiver(service.bus, service.run, settings.folder / "weights" / FETCHED)
        follow = partial(follow_policy, path_of=receiver.path_of, max_behind=settings.max_staleness)
        await follow(service, directory, anyio.Event(), settings.training.name)


class _StepRecord(NamedTuple):
    """The figures of a batch's step; by sequence in ROLLOUTS, why groups were dropped; why the batch is void; the batch
    with what all ranks know of it."""

    figures: dict[str, float]
    dropped: dict[int, str]
    void: str | None
    batch: LedgerBatch


class _Trainer:
    def __init__(
        self,
        service: Service,
        settings: TrainerSettings,
        *,
        policy: PolicyModel,
        learner: Learner,
        leader: Leader,
        feed: BatchFeed,
        tracking: Tracking,
        on_past: OfflineRun | None,
        tasks: TaskGroup,
    ) -> None:
        self.service = service
        self.settings = settings
        self.policy = policy
        self.learner = learner
        self.leader = leader
        self.limits = trainer_limits(
            policy.tokenizer_hash, vocabulary_of(policy.model), settings.training.reads, settings.training.learner
        )
        self.feed = feed
        self.lineage = os.urandom(3).hex()
        self.unreported = UnreportedSteps(learner.steps)
        self.memory: str | None = None  # what was said of how steps are divided to fit into memory
        self.large_steps = LargeSteps()
        self.slowest: deque[tuple[float, str]] = deque(maxlen=_SLOW_STEPS)  # seconds and group, one a step
        self.tracking = tracking
        self.on_past = on_past
        self.numerics = msgspec.structs.replace(numerics_of(settings, learner.device), ranks=leader.ranks.size)
        self.peer_metrics = PeerMetrics()
        self.publisher = PolicyPublisher(
            service, settings, feed, policy, tasks, lineage=self.lineage, vocabulary=self.limits.vocabulary
        )
        self.checkpoints = OneAtATime(tasks)
        # a GPU's copies are in pinned memory, which takes long to get; others are freed once they are written
        self.pinned = HostCopies() if learner.device.type == "cuda" else None
        self.evaluations = EvaluationReader(service.bus, settings.run, settings.revision, settings.evaluations_of)
        self.rolling = RollingTrainingStats()
        self.newest: LedgerBatch | None = None

    @classmethod
    async def restored(
        cls,
        service: Service,
        settings: TrainerSettings,
        leader: Leader,
        *,
        tracking: Tracking,
        tasks: TaskGroup,
        on_past: OfflineRun | None,
    ) -> "_Trainer":
        """Return a trainer at the newest checkpoint, or at the beginning; see `resume` for what it refuses.

        A checkpoint whose report was cut off is reported now.
        """
        await service.starts_with("loading its newest checkpoint or the model")
        feed = await BatchFeed.open(service.bus, settings.run, settings.training.name, term=service.instance)
        policy, learner, checkpoint = await resume(settings, feed, leader.device)
        learner = await leader.join(policy, learner, feed)
        learner.inputs = load_inputs(settings.training.inputs, policy, learner.trained)
        await tracking.resume(learner.steps)
        trainer = cls(
            service,
            settings,
            policy=policy,
            learner=learner,
            leader=leader,
            feed=feed,
            tracking=tracking,
            on_past=on_past,
            tasks=tasks,
        )
        if checkpoint is not None and (feed.report is None or feed.report.step < checkpoint.state.step):
            state = checkpoint.state
            trainer.unreported.voids, trainer.unreported.drops = list(state.voids), list(state.drops)
            await trainer.unreported.report(service, settings.drain_s, feed, state, checkpoint.path)
        return trainer

    async def train(self) -> None:
        """Take batches, one ahead, until there is nothing more to do and all that came of it is stored."""
        await train_batches(
            self.service, self.feed, step=self._step, save=self._save_new_steps, finished=self._finished
        )
        await self.publisher.finish()
        await self.checkpoints.finish()

    async def _save_new_steps(self) -> None:
        if self.learner.steps > self.unreported.checkpointed:
            await self._checkpoint()

    def _finished(self) -> bool:
        return self.settings.training.steps is not None and self.learner.steps >= self.settings.training.steps

    async def _step(self, batch: LedgerBatch) -> None:
        number = batch.batch.number
        if number != self.learner.steps:
            raise CheckpointError(f"batch {number} follows step {self.learner.steps}: checkpoint and ledger disagree")
        start_ns = self.service.now_ns()
        trace, span = step_trace(batch)
        with recording(self.service.tracing.clock, self.service.name, trace, span) as children:
            learned = await self._train_batch(batch)
            batch = learned.batch
            self.feed.mark_trained(batch)
            self.newest = batch
            if self.on_past is None:
                with traced("publish_weights"):
                    await self.publisher.publish(self.learner.steps)
        ended_ns = self.service.now_ns()
        void, figures = learned.void, learned.figures
        teacher = self.settings.has_teacher
        kept = trace_step(
            self.service, batch, (start_ns, ended_ns), children, void=void, dropped=learned.dropped, teacher=teacher
        )
        self.unreported.times.append(StepTimes(number, start_ns, ended_ns))
        self._show_slowest(batch, ended_ns, kept)
        self.service.record_call(start_ns, batch.batch.sequences, failed=void is not None)
        weight = batch.batch.sequences, batch.batch.tokens
        figures["train/time"] = ended_ns / 1e9
        if self.on_past is None:
            trained = BatchTimings(batch.stamps(start_ns, ended_ns), batch.started_ns, ended_ns, *weight)
            self.rolling.record_batch(trained)
            figures |= latencies(trained) | self.rolling.figures()
        else:
            self.on_past.trained(self.learner.steps)
        self.service.vitals.done(Stamp("trainer", batch.entry.written_ns, start_ns, ended_ns), len(batch.batch.groups))
        self.service.vitals.emitted += len(batch.batch.groups)
        await self._show(figures | self.service.tracing.figures())
        due = self.unreported.is_checkpoint_due(self.settings.training, self.learner.steps)
        if due or self._has_urgent_large_step():
            await self._checkpoint()

    async def _train_batch(self, batch: LedgerBatch) -> _StepRecord:
        """Take the optimizer step on what can be used of the batch; or count it, and say why the batch is void."""
        number = batch.batch.number
        if self.on_past is not None and batch.unfetched:
            raise next(iter(batch.unfetched.values()))  # it was there when the ledger was formed
        await self._begin_batch(batch)
        try:
            trained = await in_thread(self.leader.ranks, self._train, batch)
        except DataError as error:
            self.unreported.record_void(number, error)
            self.learner.steps = number + 1
            return _StepRecord({}, {}, str(error), batch)
        selected, metrics = trained.selected, trained.metrics
        self.unreported.record_drops(number, selected)
        self.unreported.mismatches.append(mismatch_of(metrics, trained.envs))
        self._tell_large_step(metrics)
        self._tell_memory(metrics)
        past = self.on_past.past if self.on_past is not None else None
        figures = step_figures(metrics, trained.tokens, selected.refs, number, past) | env_figures(trained.envs)
        figures["train/dropped_groups"] = float(self.unreported.dropped)
        return _StepRecord(figures, selected.dropped, None, trained.batch)

    async def _begin_batch(self, batch: LedgerBatch) -> None:
        """Wait until all ranks have their share. Raises `InfrastructureError` where the service drains before."""
        begun = False
        self.service.set_note("ranks", "the other ranks fetch their shares of the batch")
        async with self.service.until_drained():
            await self.leader.begin_batch(batch)
            begun = True
        self.service.set_note("ranks", None)
        if not begun:
            raise InfrastructureError("drained while other ranks fetched their shares")

    def _train(self, batch: LedgerBatch) -> TrainedBatch:
        seed = self.settings.seed if self.settings.training.shuffle_advantages else None
        pad_id = self.policy.tokenizer.pad_token_id or 0
        deterministic = self.settings.training.deterministic
        return train_batch(
            self.learner, batch, self.limits, pad_id=pad_id, shuffle_seed=seed, deterministic=deterministic
        )

    def _has_urgent_large_step(self) -> bool:
        """Whether the last step was too large but was taken, and is one of the first that a report has to name."""
        taken = self.settings.training.learner.on_large_step == "warn"
        return taken and self.large_steps.urgent

    def _tell_large_step(self, metrics: StepMetrics) -> None:
        """Warn of the first of several steps that were too large, and raise a notice of each.

        The notice outlives the step, which may be over before a heartbeat.
        """
        note = metrics.large_step
        if note is not None:
            if not self.large_steps.large:
                log.warning("step %d: %s", metrics.step, note)
            self.service.set_problem("step", f"step {metrics.step}: {note}", for_s=_LARGE_STEP_SHOWN_S)
        self.large_steps.record(large=note is not None)

    def _tell_memory(self, metrics: StepMetrics) -> None:
        """Warn when a step is divided more than the settings say, and record it, so that it can be repeated."""
        if metrics.memory is not None and metrics.memory != self.memory:
            log.warning("step %d: %s", metrics.step, metrics.memory)
        elif metrics.memory is None and self.memory is not None:
            log.info(
                "step %d: there is room again: micro-batches have %d tokens", metrics.step, metrics.microbatch_tokens
            )
        self.service.set_note("memory", metrics.memory)
        self.memory = metrics.memory
        self.numerics = with_microbatch(self.numerics, metrics.step - 1, metrics.microbatch_tokens)
        self.numerics = with_packing(self.numerics, packed=metrics.packed)

    async def _show(self, figures: dict[str, float]) -> None:
        self.service.vitals.metrics = figures
        await self.tracking.log(self.peer_metrics.figures() | figures)

    async def log_last_evaluation(self) -> None:
        """End the log of a run that took its last step with the evaluation of its last policy."""
        envs = self.settings.evaluated
        if envs and self._finished():
            self.service.set_note("evaluation", "all steps are taken; the evaluation of the last policy is awaited")
            step = self.learner.steps
            figures = await last_evaluation(self.service, self.peer_metrics, self.evaluations, envs, step)
            if figures:
                await self.tracking.add_figures(figures)
            self.service.set_note("evaluation", None)

    def _show_slowest(self, batch: LedgerBatch, ended_ns: int, kept: Collection[str]) -> None:
        """Name the slowest rollouts of the last steps; where traces are exported, of those whose trace was kept."""
        named = kept if self.service.tracing.on else batch.started_ns
        took = [((ended_ns - batch.started_ns[group]) / 1e9, group) for group in named]
        self.slowest.extend([max(took)] if took else [])
        self.service.vitals.slow = {group: seconds for seconds, group in sorted(self.slowest)[-_MAX_SLOW_REPORTED:]}

    async def _checkpoint(self) -> None:
        """Copy what makes the present step durable; write it, and report it then, while training goes on."""
        await self.checkpoints.finish()
        await self._point_to_best()  # so that the best one is not among those that are removed now
        await self.leader.gather_optimizer(self.learner)
        memory = self.pinned or HostCopies()
        with told_as_out_of_memory(self.learner.device, "the copy of what a checkpoint holds", COPY_ADVICE):
            content = await anyio.to_thread.run_sync(CheckpointContent.of, self.policy, self.learner, memory)
        self.learner.gathered = None
        steps = self.unreported.hand_over(content.step)
        self.large_steps.mark_reported()
        await self.checkpoints.start(partial(self._save, content, steps, self.feed.position, self.newest))

    async def _save(
        self, content: CheckpointContent, steps: UnreportedSteps, position: LedgerPosition, newest: LedgerBatch | None
    ) -> None:
        """Write a checkpoint of `steps`, whose last batch is `newest`, then report it."""
        folder = self.settings.folder / CHECKPOINTS
        state = await write_when_room(
            folder,
            partial(
                save_content,
                folder,
                content,
                lineage=self.lineage,
                ledger_position=position.entries,
                chain_hash=position.digest,
                unreported=list(range(steps.checkpointed, content.step)),
                voids=steps.voids,
                drops=steps.drops,
                numerics=self.numerics,
                keep=self.settings.training.checkpoints_kept,
            ),
            needed_bytes=content.nbytes,
        )
        await steps.report(self.service, self.settings.drain_s, self.feed, state, latest_checkpoint(folder))
        await self._point_to_best()
        if newest is not None:
            self.tracking.log_samples(readable_samples(newest.groups))
            if self.on_past is not None:
                self.on_past.durable(newest.entry)

    async def _point_to_best(self) -> None:
        """Let `best` name the checkpoint of the best held-out rate, by the evaluations that can be read at once.

        No checkpoint waits for them, nor fails without: the next one asks again.
        """
        if self.on_past is not None or not self.evaluations.reads:
            return
        with anyio.move_on_after(_EVALUATIONS_S), suppress(InfrastructureError, HistoryLostError):
            await self.evaluations.catch_up()
        best = self.evaluations.evaluations.best
        if best is not None:
            folder = self.settings.folder / CHECKPOINTS
            await write_when_room(folder, partial(point_to_best, folder, best))
