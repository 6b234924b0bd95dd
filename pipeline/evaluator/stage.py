"""Runs the evaluator: measures policy versions on held-out tasks, on an inference server of its own.

It reads policy records and writes `EvalEvent`s. The version to be measured is loaded into the evaluation server, so
training goes on meanwhile and no sample mixes two policies; nothing of it enters the ledger. After a restart, measured
versions are not measured again, and a first one that was under way is, whatever was trained meanwhile. By default the
tasks are those that the run's own environments hold out of training. An environment that cannot be evaluated is then
left out and reported, and never ends the run.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio.to_thread

from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.environment.held_out import keep_record, read_held_out
from lachesis.pipeline.environment.plain_hooks import HOOKS
from lachesis.pipeline.errors import AccessError, DamagedError, EnvironmentCodeError, InfrastructureError, NotFoundError
from lachesis.pipeline.evaluator.evaluated_env import EvaluatedEnv, load_evaluated_env
from lachesis.pipeline.evaluator.first_policy import FirstPolicy
from lachesis.pipeline.evaluator.logic.figures import evaluation_figures
from lachesis.pipeline.evaluator.schedule import Schedule
from lachesis.pipeline.evaluator.settings import EvaluatedEnvSettings, EvaluatorSettings
from lachesis.pipeline.inference.directory import InferenceDirectory, control_token, open_configured_role
from lachesis.pipeline.inference.weight_traces import traced_update
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.weights.download import FETCHED, WeightsReceiver
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import MAX_EVALUATED_TASKS, EvalEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError, SchemaError

__all__ = ["run_evaluator"]

log = logging.getLogger("lachesis")

_MAX_NAMED = 5
"""Tasks that a problem names."""
_FIRST = "first"
"""Folder, inside that of a run's weights, for those of its first policy."""
_HARDLY_ANY = 0.03
"""Held-out rate up to which the environment's own judgement may be stricter than what the raters train for."""


@dataclass(frozen=True, slots=True)
class _ScheduledEnv:
    """An environment to evaluate, its schedule, and the `newest` evaluation of an earlier life."""

    evaluated: EvaluatedEnv
    schedule: Schedule
    newest: EvalEvent | None

    @property
    def name(self) -> str:
        return self.evaluated.name


async def run_evaluator(service: Service, settings: EvaluatorSettings) -> None:
    """Evaluate on the schedule until the service drains, or until the run's last policy is evaluated.

    In a run that observes, the trainer is another's: no policy is the last one.
    """
    async with (
        service.until_drained(),  # an evaluation cut short leaves nothing behind
        open_configured_role(
            service.bus,
            service.run,
            settings.access,
            token=control_token(settings.folder, "eval"),
            requested=service.requested,
        ) as directory,
    ):
        evaluator = _Evaluator(service, settings, directory)
        envs = [await evaluator.open(name, one) for name, one in settings.environments.items()]
        await service.starts_with("waiting for the inference server of evaluations")
        await directory.current()
        service.mark_ok()
        longest_s = max((one.evaluated.env.rollout_timeout_s for one in envs), default=0.0)
        service.loop_holders, service.held_limit_s = HOOKS, max(longest_s, service.held_limit_s)
        for one in envs:
            if doubt := _doubt(one):
                evaluator.set_problem(f"environment {one.name}", doubt)
        if (unfinished := await anyio.to_thread.run_sync(evaluator.first.load)) is not None:
            await evaluator.evaluate_due(unfinished, [one for one in envs if one.schedule.done is None])
        async with service.bus.watch(keys.POLICY) as entries:
            async for entry in entries:
                try:
                    record = decode(PolicyRecord, entry.value)
                except SchemaError as error:  # the trainer publishes another one
                    evaluator.set_problem("policy", f"a policy record cannot be read, and is not evaluated: {error}")
                    continue
                await evaluator.evaluate_due(record, envs)
                step = record.policy_version.step
                if settings.ends and settings.last_step is not None and step >= settings.last_step:
                    return  # evaluated, or refused: there will be no other


def _is_of(env: str, newest_step: float) -> Callable[[EvalEvent], bool]:
    """Return what says whether an evaluation may be one of `env`: a forged one may be of a policy yet to come."""
    return lambda event: event.env == env and event.policy_step <= newest_step


class _PolicyRefusedError(DataError):
    """Raised when the evaluation server refuses a policy's weights, or they are pruned: a newer one is on its way."""


def _doubt(scheduled: _ScheduledEnv) -> str | None:
    """Return why an environment cannot be evaluated, or why its evaluations cannot be trusted."""
    if (reason := scheduled.evaluated.reason_without_tasks()) is not None:
        return reason
    newest = scheduled.newest
    if newest is None:
        return None
    pairs = (
        zip(newest.task_keys, scheduled.evaluated.keys, strict=False)
        if newest.task_keys
        else zip(newest.tasks, scheduled.evaluated.tasks, strict=False)
    )
    if any(then != now for then, now in pairs):
        return (
            f"environment {scheduled.name} is evaluated on other tasks than up to step {newest.policy_step}, since "
            "seed, tasks or evaluate.held_out changed: they may have been trained on"
        )
    return None


def _failing(scheduled: _ScheduledEnv, event: EvalEvent) -> str | None:
    """Say how to have raters judge, where an environment that judges itself finds hardly anything right; else None."""
    if event.avg > _HARDLY_ANY or scheduled.evaluated.settings.success_rater is not None:
        return None
    return (
        f"at most {_HARDLY_ANY:.0%} of the answers to held-out tasks of {scheduled.name} are right by the "
        f"environment's own judgement; if a rater tells better, name it in environments.{scheduled.name}.success_rater"
    )


class _Evaluator:
    def __init__(self, service: Service, settings: EvaluatorSettings, directory: InferenceDirectory) -> None:
        self.service = service
        self.settings = settings
        self.directory = directory
        self.too_long: dict[str, set[int]] = {}
        """By environment: the held-out tasks with prompts beyond the context."""
        self.receiver = WeightsReceiver(service.bus, service.run, settings.folder / "weights" / FETCHED)
        self.first = FirstPolicy(settings.folder / "weights" / _FIRST)

    async def open(self, name: str, settings: EvaluatedEnvSettings) -> _ScheduledEnv:
        """Return an environment, scheduled after the newest evaluation of it that is stored."""
        await self.service.starts_with(f"loading environment {name} ({settings.config.kind})")
        record = await read_held_out(self.service, name) if settings.held_out.holds_out else None
        keep_record(self.settings.folder, name, record)
        evaluated = await anyio.to_thread.run_sync(load_evaluated_env, settings, name, record)
        subject = subjects.event("eval", self.service.run, self.service.revision, name)
        read = self.service.retrying(f"read {subject}")
        newest: EvalEvent | None = None
        try:
            is_ours = _is_of(name, await self._newest_step())
            newest, _, _ = await read(
                read_last_event, self.service.bus, subjects.EVENTS, subject, EvalEvent, is_ours, newer="skip"
            )
        except DamagedError as error:  # evaluating again only costs time
            log.warning("the newest evaluation of %s cannot be read: %s", name, error)
        if newest is not None:
            self._show(newest)
        done = newest.policy_step if newest else None
        schedule = Schedule(self.settings.evaluate, self.settings.last_step, done)
        return _ScheduledEnv(evaluated, schedule, newest)

    def _holds_out(self, env: str) -> bool:
        return self.settings.environments[env].held_out.holds_out

    async def _newest_step(self) -> float:
        """Return the step of the newest policy, -1 before the first, infinity where its record cannot be read."""
        entry: Entry | None = await self.service.retrying(f"read {keys.POLICY}")(self.service.bus.value, keys.POLICY)
        try:
            return -1 if entry is None else decode(PolicyRecord, entry.value).policy_version.step
        except SchemaError:
            return math.inf

    async def evaluate_due(self, record: PolicyRecord, envs: Sequence[_ScheduledEnv]) -> None:
        """Evaluate a policy on those of the environments that it is due for."""
        step = record.policy_version.step
        due = [
            (one, items)
            for one in envs
            if one.evaluated.tasks and step in self.settings.evaluable and (items := one.schedule.due(step)) is not None
        ]
        is_first = any(one.schedule.done is None for one, _ in due)
        try:
            if is_first:
                record = await self._keep_first(record)
            for one, items in due:
                if await self.evaluate(record, one, items):
                    one.schedule.done = step
        except _PolicyRefusedError as error:
            self.set_problem("policy", f"policy {record.version} was not evaluated: {error}")
        if is_first and not self.service.draining.is_set():
            await anyio.to_thread.run_sync(self.first.drop)

    async def _keep_first(self, record: PolicyRecord) -> PolicyRecord:
        """Keep a first policy until it is evaluated; return the record by which it is."""
        if record == await anyio.to_thread.run_sync(self.first.load):
            return record
        try:
            async for attempt in self.service.retrying(f"fetch {record.version}"):
                with attempt:
                    path = await self.receiver.path_of(record)
            return await anyio.to_thread.run_sync(self.first.keep_weights, record, path)
        except (OSError, AccessError, DataError, NotFoundError, InfrastructureError) as error:
            log.info("policy %s is evaluated, but not kept for a restart: %s", record.version, error)
            return record

    async def evaluate(self, record: PolicyRecord, scheduled: _ScheduledEnv, items: int) -> bool:
        """Evaluate one policy on an environment; say whether it could be done. Raises `_PolicyRefusedError`."""
        try:
            async for attempt in self.service.retrying(f"evaluate {record.version}"):
                with attempt:
                    event = await self._measure(record, scheduled.evaluated, items)
        except InfrastructureError:  # draining
            return False
        except _PolicyRefusedError:
            raise
        except (AccessError, DataError, EnvironmentCodeError, ConfigError) as error:
            if not isinstance(error, AccessError | DataError) and not self._holds_out(scheduled.name):
                raise  # if no evaluation was configured, the run goes on without
            self.set_problem(scheduled.name, f"policy {record.version} was not evaluated on {scheduled.name}: {error}")
            return False
        self.service.mark_ok()
        self.set_problem("policy", None)
        self.set_problem(scheduled.name, _failing(scheduled, event))
        await self._publish(event)
        return True

    def set_problem(self, about: str, text: str | None) -> None:
        """Raise a notice of what is not evaluated and why; None ends it."""
        self.service.mark_ok()
        if text is not None:
            log.warning("%s", text)
        self.service.set_problem(about, text)

    def note_too_long(self, env: str, too_long: Sequence[int]) -> None:
        """Name held-out tasks that do not fit into the context; the supervisor logs it."""
        known = self.too_long.setdefault(env, set())
        known.update(too_long)
        if known:
            named = ", ".join(map(str, sorted(known)[:_MAX_NAMED])) + (", ..." if len(known) > _MAX_NAMED else "")
            text = f"environment {env}: {len(known)} held-out tasks leave no room for an answer in the context, so they"
            self.service.set_problem(f"{env} too long", f"{text} are not evaluated: {named}")

    async def _measure(self, record: PolicyRecord, evaluated: EvaluatedEnv, items: int) -> EvalEvent:
        started_ns = time.time_ns()
        client = await self.directory.current()
        if await client.weight_version() != record.version:
            try:
                with traced_update(self.service, self.settings.trainer, record.policy_version):
                    path = await self.receiver.path_of(record)
                    self.service.set_note("digest", await client.update_weights(path, record.version))
            except (AccessError, DataError, NotFoundError) as error:
                raise _PolicyRefusedError(str(error)) from error
        result = await evaluated.measure(
            client,
            items=items,
            greedy=items >= min(self.settings.evaluate.items, len(evaluated.tasks)),
            policy_version=record.version,
            report=self.service.report_wait,
        )
        self.note_too_long(evaluated.name, result.too_long)
        if result.avg_at_k is None or result.pass_at_k is None:
            raise DataError(f"environment {evaluated.name} scored none of {result.items} items")
        known = dict(zip(evaluated.tasks, evaluated.keys, strict=True))
        carried = result.tasks if len(result.tasks) <= MAX_EVALUATED_TASKS else {}
        return EvalEvent(
            run=self.service.run,
            env=evaluated.name,
            revision=self.service.revision,
            policy_version=record.version,
            policy_step=record.policy_version.step,
            items=result.items,
            k=result.k,
            temperature=result.temperature,
            avg=result.avg_at_k,
            error=result.error,
            pass_at_k=result.pass_at_k,
            greedy=result.greedy,
            unjudged=result.unjudged,
            tasks=list(carried),
            task_keys=[known[task] for task in carried],
            task_successes=[task.succeeded for task in carried.values()],
            task_judged=[task.judged for task in carried.values()],
            examples=result.examples,
            started_ns=started_ns,
            ended_ns=time.time_ns(),
        )

    async def _publish(self, event: EvalEvent) -> None:
        subject = subjects.event("eval", event.run, event.revision, event.env)
        msg_id = f"eval.{event.run}.{event.revision}.{event.env}.{event.policy_version}"
        async for attempt in self.service.retrying(f"publish {subject}"):
            with attempt:
                await self.service.bus.publish(subject, encode(event), msg_id=msg_id)
        vitals = self.service.vitals
        vitals.handled += 1
        vitals.emitted += 1
        vitals.process.record((event.ended_ns - event.started_ns) / 1e9)
        self._show(event)

    def _show(self, event: EvalEvent) -> None:
        """Put an environment's newest figures into the heartbeat."""
        own = f"eval/{event.env}/"
        metrics = {key: value for key, value in self.service.vitals.metrics.items() if not key.startswith(own)}
        self.service.vitals.metrics = metrics | evaluation_figures(event)
