"""Runs the curriculum: learns task weights from rewards, with one writer for each environment.

It learns from every finished group, also dropped ones, unless the group names a policy step that the run has not
trained: if that step counted as the newest, all later groups would be too old to learn from. A group of no task of the
pool is not learned from; such groups are counted, and environments without a curriculum are named in log and
heartbeats. Where clients elsewhere draw the tasks, their groups name their items, and the weights go back to them by
name. A commit holds the feedback of one burst, from which alone the state is rebuilt; the snapshot for
drawing goes to the run's bucket, at most twice a second.
"""

import logging

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.common.paths import code_name
from lachesis.pipeline.curriculum.drawn_environments import (
    curriculum_environments,
    describe_curriculum,
    reason_no_curriculum,
)
from lachesis.pipeline.curriculum.logic.features import FEATURES, prompt_features
from lachesis.pipeline.curriculum.logic.learner import NamedItemLearner, PoolLearner
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool
from lachesis.pipeline.curriculum.settings import CurriculumEnv, CurriculumSettings
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.held_out import read_held_out
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.errors import InfrastructureError, LedgerError, SettingsChangedError
from lachesis.pipeline.runtime.commitlog import RestoredState
from lachesis.pipeline.runtime.inputs import InputSource
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stateful import BackgroundTask, CommitReceipt, StatefulStage
from lachesis.pipeline.tasks.item_keys import content_key, exact_key, unique_keys
from lachesis.pipeline.tasks.task import Task
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import CurriculumEvent, RewardEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.control import CurriculumSnapshot, HeldOutRecord
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import LedgerEntry

__all__ = ["GATHER_S", "CurriculumWriter", "items_of", "load_items", "run_curriculum"]

log = logging.getLogger("lachesis")

_PUBLISH_S = 0.5
GATHER_S = 0.25
"""How long rewards may wait for others, seconds: weights are published no more often."""
_MAX_FEEDBACK_PER_COMMIT = 8192
"""Approximate amount of feedback in one commit, so that it fits into a message."""


async def run_curriculum(service: Service, settings: CurriculumSettings) -> None:
    """Follow every environment of the run for which it can draw tasks, until the service drains."""
    for line in describe_curriculum(settings):
        log.info("%s", line)
    for env in settings.environments:
        reason = reason_no_curriculum(settings, env)
        service.set_note(f"{env} curriculum", None if reason is None else f"no curriculum for {env}: {reason}")
    own = curriculum_environments(settings)
    if not own:
        service.mark_ok()
        await service.draining.wait()
    async with anyio.create_task_group() as tasks:
        for env, one in own.items():
            tasks.start_soon(_run_env, service, settings, env, one)


def items_of(env: Environment, held_out: NDArray[np.int64] | None = None) -> ItemPool:
    """Return what the curriculum knows of an environment's tasks before anything was tried.

    `held_out`: those that are not drawn; None: all are.
    """
    count = len(env)
    found: dict[str, int] = {}
    skill, names, contents = np.empty(count, np.int32), np.empty(count, np.uint64), np.empty(count, np.uint64)
    difficulty: NDArray[np.float64] | None = np.empty(count, np.float64)
    features: NDArray[np.float32] | None = None  # of no use where all difficulties are known
    for index in range(count):  # a task at a time: a pool may be of millions
        task = env.task(index)
        skill[index] = found.setdefault(task.skill or "", len(found))
        names[index], contents[index] = exact_key(task.item), content_key(task)
        if task.difficulty is None and features is None:
            difficulty, features = None, np.empty((count, len(FEATURES)), np.float32)
            for before in range(index):
                features[before] = _features_of(env.task(before))
        if features is not None:
            features[index] = _features_of(task)
        elif difficulty is not None and task.difficulty is not None:
            difficulty[index] = task.difficulty
    skills = sorted(found)
    place = np.empty(len(found), np.int32)
    place[[found[one] for one in skills]] = np.arange(len(skills))
    return ItemPool(
        count,
        difficulty=difficulty,
        skill=place[skill],
        skills=skills,
        held_out=np.empty(0, np.int64) if held_out is None else held_out,
        features=features,
        keys=unique_keys(item_keys_of(env), names),
        names=names,
        contents=contents,
    )


def _features_of(task: Task) -> tuple[float, ...]:
    return prompt_features("\n".join(message.content or "" for message in task.messages))


def load_items(settings: CurriculumEnv, record: HeldOutRecord | None) -> ItemPool:
    """Load an environment and return the items that its curriculum draws from.

    `record`: which of its tasks are held out.
    """
    env = load_environment(settings.kind, settings.params)
    return items_of(env, settings.held_out.split(item_keys_of(env), record).tasks)


async def _run_env(service: Service, settings: CurriculumSettings, env: str, env_settings: CurriculumEnv) -> None:
    items = None
    if not env_settings.is_foreign:
        await service.starts_with(f"loading environment {env} ({env_settings.kind})")
        record = await read_held_out(service, env)
        items = await anyio.to_thread.run_sync(load_items, env_settings, record)
    writer = CurriculumWriter(service, settings, env, items)
    await writer.open()
    await writer.follow()


class CurriculumWriter(StatefulStage[CurriculumEvent]):
    """The single writer of what one environment's curriculum learned. `items` None: its clients name them."""

    name = "curriculum"
    kind = "curriculum"

    def __init__(self, service: Service, settings: CurriculumSettings, env: str, items: ItemPool | None) -> None:
        super().__init__(service, env, CurriculumEvent, (subjects.EVENTS,))
        config = settings.config
        self.strategy_name = code_name(config.strategy)
        self.learner = NamedItemLearner(env, config) if items is None else PoolLearner(env, items, config)
        self._ledger = subjects.ledger(service.run, settings.trainer)
        self._without_task = 0
        """Groups of this process' life that are of no task of the pool."""
        self._batches = 0
        """Batches that the ledger was seen to hold; a policy of step n has been trained on n of them."""
        self._looked = False
        """Whether that was since the last commit: the batches behind a policy are stored before anything it made."""
        self._changed = anyio.Event()

    async def restore(self, restored: RestoredState) -> None:
        """Take over what was learned."""
        if restored.state is not None:
            try:
                self.learner.load_state(restored.state)
            except SettingsChangedError as error:
                raise SettingsChangedError(f"environment {self.env}: {error}") from error
        if restored.has_gap:
            log.warning("%s: what was learned lately is lost with the server's history, and is learned again", self.env)
        if self.learner.moved:
            log.warning("%s: %s", self.env, self.learner.moved)
        for delta in () if restored.has_gap else restored.deltas:
            self.learner.apply_delta(delta)
        self._changed.set()

    def sources(self) -> list[InputSource]:
        """Return the environment's rewards."""
        rewards = subjects.event("reward", self.service.run, self.service.revision, self.env)
        return [InputSource(subjects.EVENTS, [rewards], self.cursors[subjects.EVENTS], gather_s=GATHER_S)]

    def tasks(self) -> list[BackgroundTask]:
        """Return what publishes the weights."""
        return [self.publish_snapshots]

    async def feed(self, message: StoredMessage) -> None:
        """Learn from the rewards of one message."""
        self.cursors = {subjects.EVENTS: message.seq + 1}
        for reward in decode(RewardEvent, message.data).groups:
            self.service.vitals.handled += 1
            feedback = self.learner.feedback_of(reward)
            if feedback is None:
                self._count_without_task()
                continue
            if feedback.policy_step > self._batches and not self._looked:
                self._batches, self._looked = await self._formed(), True
            try:
                self._check_step(feedback)
                self.learner.observe(feedback, reward.item)
            except DataError as error:  # no item of the pool, no share of successes: an environment's slip
                self.service.set_problem("feedback", f"feedback left out: {error}")
            else:
                self.service.set_problem("feedback", None)

    def _count_without_task(self) -> None:
        self._without_task += 1
        self.service.vitals.metrics[f"curriculum/{self.env}/without_task"] = self._without_task
        self.service.set_note(
            f"{self.env} without task",
            f"{self.env}: {self._without_task} groups {self.learner.without_item}",
        )

    async def _formed(self) -> int:
        """Return how many batches were formed so far, by the newest entry of the ledger.

        Raises `LedgerError` where there are messages and none of them is an entry: no fault of the rewards at hand.
        """
        read = self.service.retrying("read the ledger")
        run = self.service.run
        found: tuple[LedgerEntry | None, int, int] = await read(
            read_last_event, self.service.bus, subjects.LEDGER, self._ledger, LedgerEntry, lambda one: one.run == run
        )
        entry, _, last = found
        if entry is None and last:
            raise LedgerError(f"{self._ledger}: none of its messages, up to sequence {last}, is an entry")
        return 0 if entry is None else entry.next_batch

    def _check_step(self, feedback: ItemFeedback) -> None:
        if feedback.policy_step > self._batches:
            raise DataError(
                f"group {feedback.id} was made by policy step {feedback.policy_step}, which cannot be: "
                f"{self._batches} batches were ever formed"
            )

    async def advance(self) -> None:
        """Commit as much as fits into a message."""
        if len(self.learner.learned) >= _MAX_FEEDBACK_PER_COMMIT:
            await self.commit()

    async def commit(self) -> None:
        """Write what was learned since the last commit."""
        observed = [feedback.id for feedback in self.learner.learned]
        event = CurriculumEvent(
            run=self.service.run,
            env=self.env,
            revision=self.service.revision,
            strategy=self.strategy_name,
            snapshot_id=self.learner.weights().id,
            commit=self.next_commit(self.learner.take_delta()),
            observed=observed,
        )
        self._looked = False
        await self.write(event)

    def state(self) -> bytes:
        """Return what was learned."""
        return self.learner.state()

    def report(self, event: CurriculumEvent, receipt: CommitReceipt) -> None:
        """Have the weights published."""
        self.service.vitals.emitted += 1
        self._changed.set()

    async def publish_snapshots(self) -> None:
        """Publish the newest weights whenever they changed. Runs until cancelled."""
        key = keys.curriculum(self.service.revision, self.env)
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            snapshot = self.learner.weights()
            event = CurriculumSnapshot(
                run=self.service.run,
                env=self.env,
                revision=self.service.revision,
                id=snapshot.id,
                observed=self.learner.strategy.observations,
                strategy=self.strategy_name,
                weights=as_bytes(snapshot.weights, "float32"),
                names=self.learner.names(),
            )
            try:
                await self.service.retrying("publish a curriculum snapshot")(self.service.bus.put, key, encode(event))
            except InfrastructureError:
                return  # draining; the next start publishes
            figures = self.learner.strategy.metrics()
            self.service.vitals.metrics |= {
                name.replace("/", f"/{self.env}/", 1): value for name, value in figures.items()
            }
            await anyio.sleep(_PUBLISH_S)  # the rate at which environments hear of changes
