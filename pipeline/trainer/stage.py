"""The trainer as a service: one optimizer step a batch in ledger order, weights, checkpoints.

What computes the steps is a back end, here or elsewhere (`TrainerBackend`); all else is decided here. No torch.

Guarantees: a batch is trained in the order of the ledger and exactly once relative to the weights, since the checkpoint
holds weights, optimizer and ledger position together; a step is reported as trained only once a checkpoint that
contains it is on disk. Checkpoints are stored and reported while the next steps are taken, one at a time, and all of
them before the trainer ends. A trainer that starts again goes on from its newest checkpoint under a new lineage, so two
different weights never share a policy version; it begins only if checkpoint, ledger and reports agree, and otherwise
publishes nothing. A group that cannot be used is dropped, with its reason in checkpoint and report, and the others of
its batch are trained; after a crash they are the same ones. A batch without any usable group is reported void and its
step is counted; so is one that the back end refuses, after which training goes on from the newest checkpoint.
"""

import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.errors import CheckpointError, HistoryLostError, InfrastructureError, leaves
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, TrainerState, latest_checkpoint
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.runtime.incidents import follow_incidents
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.recorder import recording, traced
from lachesis.pipeline.trainer.backend import BatchRefusedError, SavedStep, TrainerBackend
from lachesis.pipeline.trainer.checkpoint_folder import only_writer, point_to_best, read_checkpoint, write_checkpoint
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.last_evaluation import last_evaluation
from lachesis.pipeline.trainer.metrics import batch_figures, latencies
from lachesis.pipeline.trainer.peer_metrics import PeerMetrics
from lachesis.pipeline.trainer.ranks.place import RankPlace
from lachesis.pipeline.trainer.resume_checks import check_resumable, refuse_lost
from lachesis.pipeline.trainer.rolling_stats import BatchTimings, RollingTrainingStats
from lachesis.pipeline.trainer.samples import readable_samples
from lachesis.pipeline.trainer.serial_jobs import SerialJobs
from lachesis.pipeline.trainer.settings import TrainerSettings
from lachesis.pipeline.trainer.traces import step_trace, trace_step
from lachesis.pipeline.trainer.tracked_alerts import track_alerts
from lachesis.pipeline.trainer.tracking import Tracking, open_tracking
from lachesis.pipeline.trainer.train_loop import train_batches
from lachesis.pipeline.trainer.unreported_steps import UnreportedSteps
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ledger import LedgerEntry, StepTimes

__all__ = ["OfflineRun", "run_trainer"]

log = logging.getLogger("lachesis")

_EVALUATIONS_S = 5.0
"""Seconds that a checkpoint may wait for what evaluations there are."""
_MAX_REFUSALS = 3
"""Batches in a row that a back end may refuse: beyond, it is not the batches that are wrong."""
_SLOW_STEPS = 20
_MAX_SLOW_REPORTED = 5
"""Rollouts that the heartbeat names: the slowest over that many steps."""


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """An offline trainer: its ledger is complete, and its weights are not published.

    `start` says what staleness is counted from. `on_trained` is called with each step once it is done, `on_durable`
    with the entry of the last batch in a checkpoint.
    """

    start: OfflineStart
    on_trained: Callable[[int], None]
    on_durable: Callable[[LedgerEntry], None]


async def run_trainer(service: Service, settings: TrainerSettings, offline: OfflineRun | None = None) -> None:
    """Train until the service drains or `training.steps` steps are done."""
    service.vitals.slots = 1
    ranks = RankPlace.of(settings.training, os.environ).size
    if offline is not None and ranks > 1:
        raise ConfigError(f"training.ranks is {ranks}, but an offline trainer is one process: set it to 1")
    folder = settings.folder
    name = settings.run if offline is None else f"{settings.run}-{settings.training.name}"
    try:
        with only_writer(folder / CHECKPOINTS):
            async with (
                open_tracking(
                    folder,
                    sample_rows=settings.training.sample_rows,
                    trackers=list(settings.trackers(name)),
                    set_note=service.set_problem,
                ) as tracking,
                settings.open_backend(service, settings) as backend,
                background() as tasks,
            ):
                tasks.start_soon(_note_drain, service, settings.training.drain_s)
                if offline is None:
                    tasks.start_soon(follow_incidents, service)
                    if tracking.tracks:
                        tasks.start_soon(track_alerts, service, folder, settings.alerts_from, tracking)
                refused: dict[int, str] = {}
                restored = partial(
                    _Trainer.restored, service, settings, backend, tracking=tracking, offline=offline, refused=refused
                )
                while not await _train(restored, refused):
                    pass
    except (InfrastructureError, BaseExceptionGroup) as error:
        away = all(isinstance(leaf, InfrastructureError) for leaf in leaves(error))
        if not (away and service.draining.is_set()):
            raise
        log.warning("drained while a server was unavailable: the next start continues from the newest checkpoint")


async def _train(restored: "Callable[..., Awaitable[_Trainer]]", refused: dict[int, str]) -> bool:
    """Train from the newest checkpoint on, and return whether that is done.

    `restored`: gets a task group, and returns the trainer there. Where the back end refuses a batch, it is added to
    `refused`, by its number with the reason, and there is more to do. Raises `ConfigError` where it has refused several
    in a row.
    """
    async with background() as tasks:
        trainer = await restored(tasks=tasks)
        try:
            await trainer.run()
        except BatchRefusedError as error:
            number, name = trainer.steps, trainer.backend.name
            refused[number] = str(error)
            if all(before in refused for before in range(number - _MAX_REFUSALS + 1, number + 1)):
                raise ConfigError(
                    f"{name} refused {_MAX_REFUSALS} batches in a row, {number} the last of them: {error}; see "
                    f"training.{trainer.settings.training.backend} in the configuration, and `lachesis verify` for the "
                    "batches"
                ) from error
            await trainer.checkpoints.finish()
            log.info("goes on from the newest checkpoint, without the batches that %s refused", name)
            return False
    return True


async def _note_drain(service: Service, drain_s: float) -> None:
    """Say what a drain waits for: a step that is being taken cannot be cut short."""
    await service.draining.wait()
    service.set_note("drain", f"finishing its step and writing a checkpoint, for {drain_s:g} s at most")
    log.info("draining: %s", service.vitals.status_text)


class _StepRecord(NamedTuple):
    """The batch with what all ranks know of it; why it is void; the figures of its step; by sequence in ROLLOUTS, why
    groups were dropped; whether a checkpoint is due at once."""

    batch: LedgerBatch
    void: str | None
    figures: dict[str, float]
    dropped: dict[int, str]
    urgent: bool


class _Trainer:
    def __init__(
        self,
        service: Service,
        settings: TrainerSettings,
        backend: TrainerBackend,
        *,
        feed: BatchFeed,
        steps: int,
        lineage: str,
        tracking: Tracking,
        offline: OfflineRun | None,
        refused: Mapping[int, str],
        tasks: TaskGroup,
    ) -> None:
        self.service = service
        self.settings = settings
        self.backend = backend
        self.feed = feed
        self.steps = steps
        self.lineage = lineage
        self.unreported = UnreportedSteps(steps, anyio.current_time())
        self.slowest: deque[tuple[float, str]] = deque(maxlen=_SLOW_STEPS)  # seconds and group, one a step
        self.tracking = tracking
        self.offline = offline
        self.refused = refused
        self.peer_metrics = PeerMetrics()
        self.tasks = tasks
        self.checkpoints = SerialJobs(tasks)
        self.evaluations = EvaluationReader(service.bus, settings.run, settings.revision, settings.evaluations_of)
        self.rolling = RollingTrainingStats()
        self.newest: LedgerBatch | None = None

    @classmethod
    async def restored(
        cls,
        service: Service,
        settings: TrainerSettings,
        backend: TrainerBackend,
        *,
        tracking: Tracking,
        tasks: TaskGroup,
        offline: OfflineRun | None,
        refused: Mapping[int, str],
    ) -> "_Trainer":
        """Return a trainer at the newest checkpoint, or at the beginning.

        A checkpoint whose report was cut off is reported now. Raises as `read_checkpoint`, `check_resumable`,
        `refuse_lost` and the back end's `restore` do.
        """
        await service.starts_with("loading its newest checkpoint or the model")
        feed = await BatchFeed.open(service.bus, settings.run, settings.training.name, term=service.instance)
        folder = settings.folder / CHECKPOINTS
        path, lineage = latest_checkpoint(folder), os.urandom(3).hex()
        checkpoint: tuple[Path, TrainerState] | None = None
        if path is None:
            refuse_lost(feed, folder)
        else:
            checkpoint = path, await anyio.to_thread.run_sync(read_checkpoint, path)
            await check_resumable(checkpoint[1], path, feed)
            feed.position = checkpoint[1].position
        await backend.restore(feed, lineage, checkpoint)
        steps = 0 if checkpoint is None else checkpoint[1].step
        await tracking.resume(steps)
        trainer = cls(
            service,
            settings,
            backend,
            feed=feed,
            steps=steps,
            lineage=lineage,
            tracking=tracking,
            offline=offline,
            refused=refused,
            tasks=tasks,
        )
        if checkpoint is not None:
            path, state = checkpoint
            log.info("resumed from %s at step %d", path.name, steps)
            if feed.report is None or feed.report.step < steps:
                trainer.unreported.voids, trainer.unreported.drops = list(state.voids), list(state.drops)
                await trainer.unreported.report(service, settings.drain_s, feed, state, path)
        return trainer

    async def run(self) -> None:
        """Train; unless it is an offline trainer, make the weights of each step the run's policy."""
        if self.offline is not None:
            await self._train()
            return
        async with self.backend.publishing():
            await self.backend.publish(self.steps)
            await self.backend.finish()
            self.tasks.start_soon(self.peer_metrics.listen, self.service)
            await self._train()
            await self._log_last_evaluation()

    async def _train(self) -> None:
        """Take batches, one ahead, until there is nothing more to do and all that came of it is stored."""
        self.service.mark_ok()
        await train_batches(
            self.service, self.feed, step=self._step, save=self._save_new_steps, finished=self._finished
        )
        if self.offline is None:
            await self.backend.finish()
        await self.checkpoints.finish()

    async def _save_new_steps(self) -> None:
        if self.steps > self.unreported.checkpointed:
            await self._checkpoint()

    def _finished(self) -> bool:
        return self.settings.training.steps is not None and self.steps >= self.settings.training.steps

    async def _step(self, batch: LedgerBatch) -> None:
        number = batch.batch.number
        if number != self.steps:
            raise CheckpointError(f"batch {number} follows step {self.steps}: checkpoint and ledger disagree")
        start_ns = self.service.now_ns()
        trace, span = step_trace(batch)
        with recording(self.service.tracing.clock, self.service.name, trace, span) as children:
            learned = await self._train_batch(batch)
            batch = learned.batch
            self.steps = number + 1
            self.feed.mark_trained(batch)
            self.newest = batch
            if self.offline is None:
                with traced("publish_weights"):
                    await self.backend.publish(self.steps)
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
        if self.offline is None:
            timings = BatchTimings(batch.stamps(start_ns, ended_ns), batch.started_ns, ended_ns, *weight)
            self.rolling.record_batch(timings)
            figures |= latencies(timings) | self.rolling.figures()
        else:
            self.offline.on_trained(self.steps)
        self.service.vitals.done(Stamp("trainer", batch.entry.written_ns, start_ns, ended_ns), len(batch.batch.groups))
        self.service.vitals.emitted += len(batch.batch.groups)
        await self._show(figures | self.service.tracing.figures())
        due = self.unreported.is_checkpoint_due(self.settings.training, self.steps, anyio.current_time())
        if learned.urgent or due:
            await self._checkpoint()

    async def _train_batch(self, batch: LedgerBatch) -> _StepRecord:
        """Take the optimizer step on what can be used of the batch; or count it, and say why the batch is void."""
        number = batch.batch.number
        if self.offline is not None and batch.unfetched:
            raise next(iter(batch.unfetched.values()))  # it was there when the ledger was formed
        void = self.refused.get(number)
        if void is None:
            try:
                trained = await self.backend.step(batch)
            except BatchRefusedError:
                raise
            except DataError as error:
                void = str(error)
        if void is not None:
            self.unreported.record_void(number, void)
            return _StepRecord(batch, void, {}, {}, urgent=False)
        selected, mismatch = trained.selected, trained.mismatch
        self.unreported.record_drops(number, selected)
        self.unreported.mismatches.append(mismatch)
        figures = trained.figures | batch_figures(
            selected.refs,
            mismatch.envs or {},
            number,
            step_of=self.settings.step_of,
            offline=None if self.offline is None else self.offline.start,
        )
        figures["train/dropped_groups"] = float(self.unreported.dropped)
        return _StepRecord(trained.batch, None, figures, selected.dropped, urgent=trained.save_now)

    async def _show(self, figures: dict[str, float]) -> None:
        self.service.vitals.metrics = figures
        await self.tracking.log(self.peer_metrics.figures() | figures)

    async def _log_last_evaluation(self) -> None:
        """End the log of a run that took its last step with the evaluation of its last policy."""
        envs = self.settings.evaluated
        if envs and self._finished():
            self.service.set_note("evaluation", "all steps are taken; the evaluation of the last policy is awaited")
            step = self.steps
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
        saved = await self.backend.save(self.steps)
        steps = self.unreported.hand_over(self.steps, anyio.current_time())
        await self.checkpoints.start(partial(self._save, self.steps, saved, steps, self.feed.position, self.newest))

    async def _save(
        self,
        step: int,
        saved: SavedStep,
        steps: UnreportedSteps,
        position: LedgerPosition,
        newest: LedgerBatch | None,
    ) -> None:
        """Write a checkpoint of `steps`, whose last batch is `newest`, then report it."""
        folder = self.settings.folder / CHECKPOINTS

        def write() -> tuple[TrainerState, Path]:
            state = TrainerState(
                step=step,
                lineage=self.lineage,
                policy_version=str(saved.version()),
                ledger_position=position.entries,
                chain_hash=position.digest,
                unreported=list(range(steps.checkpointed, step)),
                voids=steps.voids,
                drops=steps.drops,
                numerics=saved.numerics,
            )
            training = self.settings.training
            keep, every = training.checkpoints_kept, training.checkpoint_every
            return state, write_checkpoint(folder, state, saved.write, keep=keep, every=every)

        state, path = await write_when_room(folder, write, needed_bytes=saved.nbytes)
        await steps.report(self.service, self.settings.drain_s, self.feed, state, path)
        self.unreported.took_s = anyio.current_time() - self.unreported.began_s
        await self.backend.clean_up()
        await self._point_to_best()
        if newest is not None:
            self.tracking.log_samples(readable_samples(newest.groups))
            if self.offline is not None:
                self.offline.on_durable(newest.entry)

    async def _point_to_best(self) -> None:
        """Let `best` name the checkpoint of the best held-out rate, by the evaluations that can be read at once.

        No checkpoint waits for them, nor fails without: the next one asks again.
        """
        if self.offline is not None or not self.evaluations.reads:
            return
        with anyio.move_on_after(_EVALUATIONS_S), suppress(InfrastructureError, HistoryLostError):
            await self.evaluations.catch_up()
        best = self.evaluations.evaluations.best
        if best is not None:
            folder = self.settings.folder / CHECKPOINTS
            await write_when_room(folder, partial(point_to_best, folder, best))
