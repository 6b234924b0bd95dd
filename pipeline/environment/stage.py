"""Runs an environment as a service: lease, draw, generate and publish, several groups at once.

Guarantees: no inference without a lease; a task held out for evaluation is never drawn, whatever the curriculum says; a
group is published once, under its own id and counter, and storing it settles its lease; a group that infrastructure
failed is abandoned and its lease given back, and so is a group that outgrew its lease even without its heaviest samples
(`oversized`), so that stored groups never exceed what was granted. Where calls are recorded, groups that a killed
process left behind are taken up before any task is drawn (`left_groups`). With the strategy `epoch`, items are claimed
in the epoch's order instead of drawn; their groups bear the item's place in it as counter, so that the ledger takes one
of each.
"""

import logging
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from anyio.abc import TaskStatus
from numpy.typing import NDArray

from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.bus.newer_writers import confirm_newer_value
from lachesis.pipeline.calls.recorder import CallRecorder
from lachesis.pipeline.common.call_times import LOOK_S
from lachesis.pipeline.common.sampling_agreement import MASK_COLUMN
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.common.trainability import TrainerLimits, TrainerReads, why_untrainable
from lachesis.pipeline.common.user_code import log_failure, refuse_ending
from lachesis.pipeline.environment.config import CollectConfig, EnvironmentConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.epoch import Claimer, EpochOrder
from lachesis.pipeline.environment.epoch_claims import EpochClaims
from lachesis.pipeline.environment.failures import GroupFailures
from lachesis.pipeline.environment.group_holder import holder_name
from lachesis.pipeline.environment.group_times import GroupTimes
from lachesis.pipeline.environment.held_out import settle_held_out
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.environment.left_groups import GroupTask, LeftGroups, records_calls
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.environment.oversized import leave_out_oversized
from lachesis.pipeline.environment.plain_hooks import HOOK_CURE, HOOKS
from lachesis.pipeline.environment.prompts_record import note_changed_prompts
from lachesis.pipeline.environment.rollout import GroupDraft, build_group, collect_group, describe_error
from lachesis.pipeline.environment.settings import EnvironmentSettings
from lachesis.pipeline.environment.task_sampler import TaskSampler
from lachesis.pipeline.environment.traces import traced_if_abandoned
from lachesis.pipeline.errors import (
    EnvironmentCodeError,
    GroupDeclinedError,
    GroupTakenError,
    InfrastructureError,
    PromptTooLongError,
    ServerAwayError,
    StreamFullError,
)
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.directory import SLOW_SERVER_CURE, InferenceDirectory, open_configured_role
from lachesis.pipeline.inference.local_tokenizer import load_local_tokenizer
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.tasks.held_out import mask_held_out
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.telemetry.messages import publish_span
from lachesis.pipeline.telemetry.recorder import not_recording, recording
from lachesis.pipeline.telemetry.spans import Span, generate_id, generate_span
from lachesis.schemas import keys, subjects
from lachesis.schemas.calls import GroupStart
from lachesis.schemas.codec import decode
from lachesis.schemas.control import CurriculumSnapshot, EpochClaim, PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError, SchemaError, VersionError
from lachesis.schemas.ids import epoch_producer, new_group_id
from lachesis.schemas.planning_header import PLAN_HEADER, TRACEPARENT_HEADER, Plan, traceparent
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["SingleGroup", "run_environment", "run_environments"]

log = logging.getLogger("lachesis")

MAX_FAILURES = 20
"""Groups in a row that the environment's own code may fail before its service ends."""
_CANCELLED_S = 10.0
"""Seconds after which a group that was cancelled waits for a thread."""
_PATIENCE_S = 15.0
"""Longest wait for a lease of a group that was taken up; it is offered to other processes after twice as long."""
_CLAIM_TTL_ROLLOUTS = 4.0
"""Times the longest rollout, after which another process takes over the claim of one that does not come back."""
_PLAIN_BYTES_PER_TOKEN = 8
"""int32 id and float32 logprob: what a token weighs before it is packed."""


class SingleGroup(NamedTuple):
    """One group of task number `task`, whatever the curriculum says, sampled with `seed`; see `run_environment`."""

    task: int
    seed: int


def _now_s() -> float:
    """Return the time for groups, without that in which a plain function held the event loop."""
    return time.monotonic() - HOOKS.held_s


async def run_environments(service: Service, settings: EnvironmentSettings) -> None:
    """Generate rollouts of the environments that this process runs."""
    async with anyio.create_task_group() as tasks:
        for env in settings.own:
            tasks.start_soon(run_environment, service, settings, env)


async def run_environment(
    service: Service, settings: EnvironmentSettings, name: str, *, single: SingleGroup | None = None
) -> None:
    """Generate rollouts of environment `name` until the service drains.

    `single`, for `lachesis dev`: generate this group again and again, as leases are granted, and raise what fails it,
    infrastructure included, instead of trying again.
    """
    config = settings.environments.get(name)
    if config is None:
        raise ConfigError(f"environments.{name}: not configured; known: {', '.join(settings.environments) or 'none'}")
    await service.starts_with(f"loading environment {name} ({config.kind})")
    env = await anyio.to_thread.run_sync(load_environment, config.kind, config.params)  # heartbeats go on
    keys_of_items = await anyio.to_thread.run_sync(item_keys_of, env)
    for doubt in env.doubts:
        log.warning("environment %s: %s", name, doubt)
    service.set_note(f"{name} tasks", "; ".join(env.doubts) or None)
    if single is None:
        held_out = await settle_held_out(service, settings.folder, name, settings.held_out[name], keys_of_items)
    else:
        held_out = settings.held_out[name].split(keys_of_items).tasks
        if not 0 <= single.task < len(env):
            raise ConfigError(f"task {single.task}: environment {name} has the tasks 0 to {len(env) - 1}")
        if single.task in held_out:
            log.warning(
                "task %d is held out for evaluation: a run does not train on it (evaluate.held_out)", single.task
            )
    await service.starts_with("waiting for the policy's inference server")
    async with (
        open_configured_role(
            service.bus,
            service.run,
            settings.policy,
            timeout_s=config.timeout_s,
            requested=service.requested,
            report_slow=lambda text, all_slow: service.set_problem(
                "slow server", text, mend=SLOW_SERVER_CURE, held_up=["scorer", "trainer"], stops=all_slow
            ),
        ) as directory,
        AsyncExitStack() as held,
    ):
        producer_id = f"environment-{name}-{service.replica}"
        producer = _Producer(
            service,
            name,
            env,
            config,
            directory,
            producer=producer_id,
            holder=producer_id if single is not None else held.enter_context(holder_name(settings.folder, producer_id)),
            held_out=held_out,
            seed=settings.seed,
            single=single,
            reads=settings.reads,
            temperature=settings.temperature,
            tokenizer=settings.tokenizer,
        )
        if settings.policy_says is not None and single is None:
            producer.guard.model = "policy"
            producer.guard.engine = settings.policy_says
        if settings.draws_by_epoch:
            producer.follow_epochs(settings.seed, keys_of_items)
        service.leases.append(producer.leases)
        service.loop_holders, service.held_limit_s = HOOKS, env.rollout_timeout_s
        async with (
            env.running(),
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(producer.follow_curriculum)
            tasks.start_soon(producer.leases.renew)
            tasks.start_soon(producer.name_late_groups)
            async with service.until_drained():
                await producer.learn_limits()
                await tasks.start(producer.follow_policy)
                await producer.compare_server()
                if single is None and len(env):
                    used = producer.guard.tokenizer_hash(config.chat_template_kwargs)
                    await note_changed_prompts(service, name, env, keys_of_items, used)
            service.vitals.slots = config.concurrency
            async with anyio.create_task_group() as workers:
                for _ in range(config.concurrency):
                    workers.start_soon(producer.work)
            tasks.cancel_scope.cancel()


class _Producer:
    def __init__(
        self,
        service: Service,
        name: str,
        env: Environment,
        settings: EnvironmentConfig,
        directory: InferenceDirectory,
        *,
        producer: str,
        holder: str,
        held_out: NDArray[np.int64],
        seed: int,
        single: SingleGroup | None = None,
        reads: TrainerReads | None = None,
        temperature: float | None = None,
        tokenizer: TokenizerSource | None = None,
    ) -> None:
        self.service = service
        self.name = name
        self.env = env
        self.held_out = held_out
        self.single = single
        self.settings = settings
        self.reads = reads
        self.temperature = temperature
        self.tokenizer = tokenizer
        self.inference = directory
        self.guard = directory.guard
        self.guard.report = self._report_server
        self.id = producer
        self.epoch = time.time_ns()
        self.holder = holder
        self.counter = 0
        self.failures = GroupFailures(service, name, len(env))
        self.times = GroupTimes(env.rollout_timeout_s, env.turn_timeout_s)
        self._ending: dict[object, tuple[anyio.CancelScope, float | None]] = {}
        """For each group under way, the scope that ends it, and when it was cancelled."""
        self._taken: set[object] = set()
        """Leases of groups under way that have ended, so that another process may go on with the group."""
        self.lost = 0
        self.declined = 0
        self.largest = settings.largest_bytes
        self.leases = ProducerLeases(service, self.id, name)
        self.leases.on_lost = self._end_taken
        self.claims: EpochClaims | None = None
        self.rng = np.random.default_rng([seed, self.epoch])
        self.weights, self.snapshot_id = np.ones(len(env), np.float32), "uniform"
        self.sampler = self._sampler()
        self.recent: deque[int] = deque(maxlen=2 * settings.concurrency)
        """Tasks that were drawn last: the curriculum cannot know of their groups yet, so its weights are too high."""
        self.left: LeftGroups | None = None
        """What a killed process has left behind; None: calls are not recorded."""
        if single is None and records_calls(name, env, settings):
            self.left = LeftGroups(
                service,
                name,
                env,
                settings,
                Claimer(holder, self.epoch),
                held_out=held_out,
                task=self._task,
                is_held=self.leases.is_held,
            )
        self.limits = TrainerLimits(reads=None)
        self.collect = CollectConfig(
            request_timeout_s=settings.timeout_s,
            lost_samples=settings.lost_samples,
            fewest_samples=settings.fewest_samples,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
        self.sampling = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            sampling_mask=reads is not None and MASK_COLUMN in reads.columns,
            max_tokens=settings.max_new_tokens,
            seed=None if single is None else single.seed,
        )

    def _report_server(self, problem: str | None) -> None:
        self.service.set_problem(
            "policy's server", problem, held_up=[self.service.name, "scorer", "trainer"], stops=True
        )

    def follow_epochs(self, seed: int, item_keys: Keys) -> None:
        """Claim items in the order of epochs from now on, instead of drawing them."""
        drawable = mask_held_out(np.ones(len(self.env)), self.held_out) > 0
        order = EpochOrder(seed, drawable, item_keys)
        ttl_s = _CLAIM_TTL_ROLLOUTS * self.env.rollout_timeout_s
        # without records, the next process of a number claims a place that one has left: the ledger takes one group
        claimer = Claimer(self.id if self.left is None else self.holder, self.epoch)
        self.claims = EpochClaims(self.service, self.name, order, claimer, ttl_s=ttl_s)

    async def follow_curriculum(self) -> None:
        """Draw by the newest snapshot. Until there is one, draw uniformly."""
        async with self.service.bus.watch(keys.curriculum(self.service.revision, self.name)) as entries:
            async for entry in entries:
                try:
                    snapshot = decode(CurriculumSnapshot, entry.value)
                except SchemaError as error:
                    log.warning("a snapshot of the curriculum cannot be read: %s", error)
                    continue
                weights = snapshot.values()
                if len(weights) == len(self.env):
                    self.weights, self.snapshot_id = weights, snapshot.id
                    self.sampler = self._sampler()
                else:
                    log.warning(
                        "snapshot %s weighs %d items, %s has %d", snapshot.id, len(weights), self.name, len(self.env)
                    )

    def _sampler(self) -> TaskSampler:
        if self.single is not None:
            alone = np.zeros(len(self.env), np.float32)
            alone[self.single.task] = 1.0
            return TaskSampler.from_snapshot(alone, "single")
        left_out = np.concatenate([self.held_out, self.failures.too_long])
        return TaskSampler.from_snapshot(mask_held_out(self.weights, left_out), self.snapshot_id)

    async def learn_limits(self) -> None:
        """Wait for the policy's server, and note its longest context."""
        async for attempt in self.service.retrying("probe the policy's server"):
            with attempt:
                capabilities = await (await self.inference.current()).probe(self.sampling)
                if self.left is not None and self.tokenizer is not None:  # several turns, each rendered twice
                    reason = await load_local_tokenizer(self.inference, capabilities, self.tokenizer)
                    if reason is not None:
                        log.info("environment %s: the server renders its conversations: %s", self.name, reason)
        self.collect = msgspec.structs.replace(
            self.collect, max_context=capabilities.max_model_len, model=Path(capabilities.model).name
        )

    async def follow_policy(self, *, task_status: TaskStatus[None]) -> None:
        """Follow the policies that the trainer publishes. It is started once there is one."""
        known = False
        async with self.service.bus.watch(keys.POLICY) as entries:
            async for entry in entries:
                try:
                    policy = decode(PolicyRecord, entry.value)
                except VersionError as error:
                    await confirm_newer_value(self.service.bus, self.service.run, keys.POLICY, error)
                    log.warning("a policy record cannot be read: %s", error)
                    continue
                except SchemaError as error:
                    log.warning("a policy record cannot be read: %s", error)
                    continue
                self.guard.expect(policy)
                self.limits = TrainerLimits.of(policy, self.reads, self.temperature)
                if not known:
                    known = True
                    task_status.started()

    async def compare_server(self) -> None:
        """Wait until the policy's server is the run's."""
        async for attempt in self.service.retrying("compare the policy's server"):
            with attempt:
                await self.guard.check(await self.inference.current(), version=True)

    async def _acquire(self) -> str | None:
        """Return a lease; None once the service drains. While another server than the run's answers, it waits."""
        if self.guard.problem is not None and self.single is None:
            async with self.service.until_drained():
                await self.compare_server()
        calls = 0 if self.left is None else self.settings.calls_bytes
        lease = await self.leases.acquire(self.settings.samples, self.largest, calls)
        if self.left is not None:
            self.left.may_be |= self.leases.left_behind > 0
        return lease

    async def work(self) -> None:
        """Make one group after another until the service drains."""
        while not self.service.draining.is_set():
            left = await self._left_behind()
            lease = await (self._acquire() if left is None else self._take_over_lease(left))
            if lease is None:
                continue  # draining, or there was no room for the group that was left behind
            with self.service.vitals.working(1):
                draw = left or await self._draw()
                made = None if draw is None else await self._generate(lease, draw)
                if draw is not None and made is not None and await self._publish(made, draw.claim):
                    self.leases.settled(lease)
                else:
                    await self.leases.release(lease)

    async def _left_behind(self) -> GroupTask | None:
        """Return a group that another life has left behind, None without any."""
        if self.left is None:
            return None
        return await self.left.take_up(self.claims, self.guard.tokenizer_hash(self.settings.chat_template_kwargs))

    async def _take_over_lease(self, draw: GroupTask) -> str | None:
        """Return a lease for a group that goes on: the one that it has, if it is still held, else a new one.

        None: there is no room yet, or the service drains; then the group is offered again.
        """
        old = None if draw.recorded is None else draw.recorded.start.lease
        if self.left is not None and old is not None:
            if await self.leases.adopt(old, self.settings.samples, self.largest, self.settings.calls_bytes):
                return old
            self.left.may_be = True
        with anyio.move_on_after(_PATIENCE_S):
            return await self._acquire()
        return None

    def _end_taken(self, lease: str) -> None:
        """End the group of a lease that has ended, with its agents, if another process may go on with it."""
        scope, cancelled_s = self._ending.get(lease, (None, None))
        if self.left is not None and scope is not None and cancelled_s is None:
            self._taken.add(lease)
            scope.cancel()
            self._ending[lease] = scope, _now_s()

    def _end_hanging(self) -> None:
        """End groups with hanging code, and the process if one of them cannot be cancelled."""
        now_s = _now_s()
        for one in self.times.hanging(now_s):
            scope, cancelled_s = self._ending.get(one.call, (None, None))
            if scope is not None and cancelled_s is None:
                scope.cancel()
                self._ending[one.call] = scope, now_s
            elif cancelled_s is not None and now_s - cancelled_s > _CANCELLED_S:
                _end_process(
                    f"a rollout of environment {self.name}, {one.what}, hangs for {one.age_s:.0f} s and cannot be "
                    "cancelled: it waits for a thread"
                )

    async def name_late_groups(self) -> None:
        """Report regularly which groups take far longer than others did, and which code holds everything up."""
        while True:
            now_s = _now_s()
            self.times.check_clock(now_s)
            late = self.times.late(now_s)
            self.service.set_problem(
                f"{self.name} late groups",
                None if late is None else f"environment {self.name}: {self.times.describe(late)}",
                mend="see where rollouts wait (py-spy shows the threads of its process); a kill makes it begin again",
                held_up=["scorer", "trainer"],
                stops=late is not None and late.are_all,
            )
            waits_for = self.env.waits_for
            self.service.set_problem(
                f"{self.name} waits",
                None if waits_for is None else f"environment {self.name}: {waits_for}",
                mend="the groups of these samples hold their leases meanwhile: see what delays it",
                held_up=["scorer", "trainer"],
            )
            slow = HOOKS.describe()
            self.service.set_problem(
                f"{self.name} slow code",
                None if slow is None else f"environment {self.name}: {slow}",
                mend=HOOK_CURE,
            )
            self._end_hanging()
            await sleep_until_tick(LOOK_S)

    async def _draw(self) -> GroupTask | None:
        """Draw an item by the curriculum, or claim the next one of the epoch; None when the service drains before."""
        if self.claims is None:
            (drawn,) = self.sampler.sample(1, self.rng, recent=list(self.recent))
            self.recent.append(drawn.item)
            return GroupTask(drawn.item, self.sampler.snapshot_id, drawn.probability)
        try:
            claim = await self.claims.claim()
            while self.failures.is_too_long(self.claims.order.item(claim)):  # known since another epoch
                await self.claims.settle(claim)
                claim = await self.claims.claim()
        except InfrastructureError:
            return None  # draining; what may be claimed is claimed again by the next life of this process
        return GroupTask(self.claims.order.item(claim), f"epoch-{claim.epoch}", 1.0 / len(self.claims.order), claim)

    async def _settle(self, claim: EpochClaim | None) -> None:
        if self.claims is not None and claim is not None:
            try:
                await self.claims.settle(claim)
            except InfrastructureError:
                return  # draining; the next life of this process makes the group again, and the ledger takes one

    async def _give_back(self, claim: EpochClaim | None, *, failed: bool = False) -> None:
        if self.claims is not None and claim is not None:
            try:
                await self.claims.give_back(claim, failed=failed)
            except InfrastructureError:
                return  # draining; the next life of this process claims it again

    async def _generate(self, lease: str, draw: GroupTask) -> "_GeneratedGroup | None":
        """Return a new group, or one that another life began.

        None when infrastructure, the server's refusal, the environment's code or its own size failed it.
        """
        vitals = self.service.vitals
        recorder: CallRecorder | None = None
        began_ns = self.service.now_ns()
        try:
            client = await self.inference.current()
            task = self._task(draw.item)
            begun = await self._begin(lease, draw, task)
            recorder = begun.recorder
            draft, made = await self._make(lease, draw, task, client, begun)
            self.lost += len(draft.lost)
            vitals.metrics[f"environment/{self.name}/lost_samples"] = self.lost
        except InfrastructureError as error:
            if self.single is not None:
                raise
            self.service.record_call(began_ns, 0, failed=True)
            where = "" if isinstance(error, _HungCodeError) else "inference: "
            self.service.mark_waiting("waiting", f"{where}{error}")
            vitals.retried += 1
            may_go_on = isinstance(error, (ServerAwayError, GroupTakenError)) or self.service.draining.is_set()
            if self.left is not None and may_go_on:
                self.left.may_be = True  # here when the server is there again, or wherever it was taken up
                return None
            await self._abandon(recorder, error)
            await self._give_back(draw.claim)
            return None
        except GroupDeclinedError as error:
            if self.single is not None:
                raise
            log.debug("no group of item %d: %s", draw.item, error)
            self.declined += 1
            vitals.metrics[f"environment/{self.name}/declined"] = self.declined
            await self._abandon(recorder, error)
            await self._give_back(draw.claim, failed=True)
            return None
        except PromptTooLongError as error:
            if self.single is not None:
                raise
            self.failures.count_too_long(draw.item, task.item, error)
            self.failures.refuse_all_too_long(len(self.env) - len(self.held_out))
            self.sampler = self._sampler()
            await self._abandon(recorder, error)
            await self._settle(draw.claim)
            return None
        except (EnvironmentCodeError, DataError) as error:  # its bug, its size, or a task that the server refuses
            if self.single is not None:
                raise
            await self._abandon(recorder, error)
            await self._give_back(draw.claim, failed=True)
            self.failures.count_failed(str(draw.item), error, MAX_FAILURES)
            return None
        thought_calls = sum(session.thought_calls for session in draft.sessions)
        self.failures.count_made(thought_calls, [failed.error for failed in draft.failures])
        self.counter += draw.claim is None and recorder is None
        return made

    async def _begin(self, lease: str, draw: GroupTask, task: Task) -> "_GroupInProgress":
        """Return the start of a group, new or resumed; it is stored if its calls will be."""
        start = self._start(lease, draw, task)
        if self.left is None:
            return _GroupInProgress(start, None)
        recorder = self.left.recorder(draw, lease, start)
        await recorder.begin()
        return _GroupInProgress(recorder.known.start, recorder)

    async def _make(
        self, lease: str, draw: GroupTask, task: Task, client: InferenceClient, begun: "_GroupInProgress"
    ) -> tuple[GroupDraft, "_GeneratedGroup"]:
        """Generate a group. Raises as `collect_group`, and `DataError` where it cannot be stored or trained on."""
        start, recorder = begun
        with self._recording(start.group, start.started_ns) as spans:
            draft = await self._collect(lease, draw.item, task, client, begun)
            await self._compare(client, draft)
            numbered = recorder is not None or draw.claim is not None
            build = partial(
                build_group,
                run=self.service.run,
                env=self.name,
                producer=start.producer,
                epoch=start.epoch,
                counter=start.counter if numbered else self.counter,
                tokenizer_hash=start.tokenizer_hash,
                lease=lease,
                dispatch=draw.dispatch if draft.task.item == task.item else None,
            )
            draft, group, data = leave_out_oversized(
                draft, build, env=self.name, samples=self.settings.samples, largest=self.largest
            )
            self._check_group(group, len(data))
            return draft, _GeneratedGroup(group, data, spans, recorder)

    def _start(self, lease: str, draw: GroupTask, task: Task) -> GroupStart:
        """Return the start of a new group. Where calls are recorded, it takes a counter that no other group has."""
        producer, epoch, counter = self._identity(draw.claim)
        self.counter += self.left is not None and draw.claim is None and draw.recorded is None
        return GroupStart(
            run=self.service.run,
            env=self.name,
            group=new_group_id(),
            life=self.epoch,
            holder=self.holder,
            producer=producer,
            epoch=epoch,
            counter=counter,
            item=task.item,
            samples=self.settings.samples,
            tokenizer_hash=self.guard.tokenizer_hash(self.settings.chat_template_kwargs),
            started_ns=self.service.now_ns(),
            lease=lease,
            dispatch=draw.dispatch,
            claim=draw.claim,
        )

    async def _abandon(self, recorder: CallRecorder | None, error: Exception) -> None:
        if self.left is not None:
            await self.left.abandon(recorder, describe_error(error))

    async def _collect(
        self, lease: str, item: int, task: Task, client: InferenceClient, begun: "_GroupInProgress"
    ) -> GroupDraft:
        """Return a group's samples. Raises `InfrastructureError` also where it is ended because its code hangs."""
        made = False
        self.times.begin(lease, _now_s(), what=f"item {item}")
        try:
            with anyio.CancelScope() as scope:
                self._ending[lease] = scope, None
                draft = await collect_group(
                    self.env,
                    task,
                    client,
                    self.settings.samples,
                    self.sampling,
                    config=self.collect,
                    group=begun.start.group,
                    started_ns=begun.start.started_ns,
                    report=self.service.report_wait,
                    report_stuck=_end_process,
                    report_request=lambda change: self.times.record_wait(lease, change, _now_s()),
                    calls=None if self.left is None or begun.recorder is None else self.left.calls(begun.recorder),
                )
                made = True
                return draft
        finally:
            del self._ending[lease]
            is_taken = lease in self._taken
            self._taken.discard(lease)
            self.times.end(lease, _now_s(), answered=made)
        if is_taken:
            raise GroupTakenError(
                f"a group of item {task.item!r:.80}: its lease has ended while this process was stopped or cut off, so "
                "that another process may go on with it"
            )
        raise _HungCodeError(
            f"{type(self.env).__name__}: the code of a group of item {task.item!r:.80} gave no sign for "
            f"{self.times.end_s:.0f} s, far longer than others, and was ended"
        )

    async def _compare(self, client: InferenceClient, draft: GroupDraft) -> None:
        """Raise `WrongServerError` where what was generated is not of the run's tokenizer, model and policies."""
        await self.guard.check(client)
        sequences = [one for session in draft.sessions for one in session.sequences]
        versions = dict.fromkeys(version for one in sequences for _, version in one.versions)
        await self.guard.check_versions(client, versions)

    def _identity(self, claim: EpochClaim | None) -> tuple[str, int, int]:
        """Return the producer, epoch and counter by which a repeated group is known: of the claim, if there is one."""
        if claim is None:
            return self.id, self.epoch, self.counter
        return epoch_producer(self.name), claim.epoch, claim.place

    def _check_group(self, group: RolloutGroup, size: int) -> None:
        """Raise `DataError` when a group weighs more than its lease allows, or when the trainer could not use it."""
        reason = why_untrainable(group, self.limits)
        if reason is not None:
            raise DataError(f"a group of item {group.item}: {reason}")
        samples, wanted = group.sequences.n_samples, self.settings.samples
        if samples > wanted or size > self.largest:
            raise DataError(
                f"a group of item {group.item} has {samples} samples and {size} bytes, where its lease is for "
                f"{wanted} and {self.largest}; raise longest_tokens of environment {self.name}, or column_bytes and "
                "attachment_bytes if it holds such"
            )

    @contextmanager
    def _recording(self, group: str, started_ns: int) -> Iterator[list[Span]]:
        """Record the requests for a sampled group. If it is abandoned, they are exported here."""
        tracing = self.service.tracing
        if not tracing.sampled(group):
            with not_recording(group) if tracing.on else nullcontext():
                yield []
            return
        with (
            recording(tracing.clock, self.service.name, group, generate_id(group)) as spans,
            traced_if_abandoned(self.service, group, self.name, started_ns, spans),
        ):
            yield spans

    def _task(self, index: int) -> Task:
        try:
            name = type(self.env).__name__
            with refuse_ending(f"{name}.task({index})"), HOOKS.timed(f"{name}.task"):
                return self.env.task(index)
        except EnvironmentCodeError:
            raise
        except Exception as error:
            log_failure(f"{type(self.env).__name__}.task({index})", error)
            raise EnvironmentCodeError(f"{type(self.env).__name__}.task({index}): {describe_error(error)}") from error

    async def _publish(self, made: "_GeneratedGroup", claim: EpochClaim | None = None) -> bool:
        """Store the group and settle its claim; False if its lease is not used.

        A claim whose group may be stored is kept: it is made again then, and the ledger takes one of the two. A drain
        prevents it, and so does another process that may have taken the group up. If it does so between the look at the
        lease and the storing, both store the same rollout: the records of its samples were whole before. The broker
        takes one of them within its window of duplicates, and of what comes later the ledger's writer.
        """
        service, (group, data, chats, recorder) = self.service, made
        subject = subjects.rollout(group.run, group.env)
        sampled = service.tracing.sampled(group.id)
        headers = {PLAN_HEADER: Plan.of(group).pack(), TRACEPARENT_HEADER: traceparent(group.id, sampled=sampled)}
        made_ns = service.now_ns()
        try:
            with traced_if_abandoned(service, group.id, group.env, group.started_ns, chats):
                if recorder is not None:
                    await recorder.check_held()
                ack: PubAck = await service.retrying(f"publish {subject}")(
                    service.bus.publish_large, subject, data, msg_id=group.id, headers=headers
                )
        except StreamFullError:
            if recorder is None:  # else the next life stores it
                await self._give_back(claim)
            return False
        except GroupTakenError as error:
            log.info("%s", error)
            if self.left is not None:
                self.left.may_be = True
            return False
        except InfrastructureError:
            return True  # what was sent may be stored all the same, without us
        await self._settle(claim)
        if recorder is not None and self.left is not None:
            await self.left.stored(recorder)
            service.vitals.metrics |= self.left.figures.metrics(self.name)
        stored_ns = service.now_ns()
        plain = _PLAIN_BYTES_PER_TOKEN * group.sequences.n_tokens + sum(
            len(message.content.encode()) for conversation in group.messages for message in conversation
        )
        service.record_call(group.started_ns, len(group.sequences), payload=len(data), plain=plain)
        service.mark_ok()
        service.vitals.handled += 1
        service.vitals.emitted += 1
        service.vitals.process.record((stored_ns - group.started_ns) / 1e9)
        if sampled:
            generated = generate_span(
                group.id,
                group.env,
                (group.started_ns, made_ns),
                {"rl.group.size": group.sequences.n_samples, "rl.policy.version": group.policy_versions[0]},
            )
            times = made_ns, stored_ns
            published = publish_span(
                service.name, group.id, generated.id, subject, times,
                server=service.bus.server, message=f"{ack.stream}:{ack.seq}", size=len(data),
            )  # fmt: skip
            service.tracing.emit([*chats, generated, published])
        return recorder is None or not ack.duplicate  # another life may have stored it under another lease


class _GroupInProgress(NamedTuple):
    """The start of a group, and what stores its calls if they are recorded."""

    start: GroupStart
    recorder: CallRecorder | None


class _GeneratedGroup(NamedTuple):
    """A group, its encoding, the spans of its requests if it is sampled, and what stores its calls if they are."""

    group: RolloutGroup
    data: bytes
    spans: list[Span]
    recorder: CallRecorder | None


class _HungCodeError(InfrastructureError):
    """Raised for a group that is ended because the environment's code hangs."""


def _end_process(why: str) -> None:
    """End this process, which cannot cancel a rollout, so that its supervisor starts it again."""
    log.error("draining, and then ending: %s", why)
    signal.raise_signal(signal.SIGTERM)
