"""The evaluator: named policy versions on held-out tasks, on an inference server of its own.

In: policy records. Out: `EvalEvent`s. The version to be measured is loaded into the evaluation server, so training goes
on meanwhile and no sample mixes two policies; nothing of it enters the ledger. After a restart what was measured
already is not measured again.
"""

import logging
import time

from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environments.config import CollectConfig
from lachesis.pipeline.environments.environment import Environment
from lachesis.pipeline.environments.evaluate import evaluate
from lachesis.pipeline.environments.load import load_environment
from lachesis.pipeline.environments.schedule import Schedule
from lachesis.pipeline.inference.directory import Directory, open_role
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.weights.traces import traced_update
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.errors import DamagedError, DataError, InfrastructureError

__all__ = ["run_evaluator"]

log = logging.getLogger("lachesis")


async def run_evaluator(service: Service, config: RunConfig) -> None:
    """Evaluate on the schedule until the service drains, or until the run's last policy is evaluated."""
    envs = {name: load_environment(settings.kind, settings.params) for name, settings in config.evaluation.items()}
    schedule = Schedule(config.evaluate, config.training.steps, await _newest_step(service, list(envs)))
    async with (
        service.until_drained(),  # an evaluation cut short leaves nothing behind
        open_role(
            service.bus, config.run, "eval", url=config.role("eval").url, requested=service.requested
        ) as directory,
    ):
        evaluator = _Evaluator(service, config, envs, directory)
        await directory.current()
        service.recovered()
        async with service.bus.watch(subjects.BUCKETS["policy"], config.run) as entries:
            async for entry in entries:
                record = decode(PolicyRecord, entry.value)
                step = record.policy_version.step
                items = schedule.due(step)
                if items is not None and await evaluator.evaluate(record, items):
                    schedule.done = step
                if schedule.is_last(step):
                    return  # evaluated, or refused: there will be no other


async def _newest_step(service: Service, envs: list[str]) -> int | None:
    """Return the newest step that every environment was evaluated at, None if there is none."""
    steps = []
    for env in envs:
        try:
            stored = await service.bus.last(subjects.EVENTS, subjects.event("eval", service.run, service.revision, env))
        except DamagedError as error:  # to evaluate once more costs time and nothing else
            log.warning("the newest evaluation of %s cannot be read: %s", env, error)
            return None
        if stored is None:
            return None
        steps.append(decode(EvalEvent, stored.data).policy_step)
    return min(steps, default=None)


class _Evaluator:
    def __init__(self, service: Service, config: RunConfig, envs: dict[str, Environment], directory: Directory) -> None:
        self.service = service
        self.config = config
        self.envs = envs
        self.directory = directory

    async def evaluate(self, record: PolicyRecord, items: int) -> bool:
        """Evaluate one policy on every environment; say whether it could be done."""
        for name, env in self.envs.items():
            try:
                async for attempt in self.service.retrying(f"evaluate {record.version}"):
                    with attempt:
                        event = await self._one(record, name, env, min(items, len(env)))
            except InfrastructureError:  # draining
                return False
            except DataError as error:
                # Its weights are pruned already, or the server refuses them: a newer policy is on its way.
                log.warning("policy %s was not evaluated: %s", record.version, error)
                self.service.vitals.note = str(error)
                return False
            self.service.recovered()
            await self._publish(event)
        return True

    async def _one(self, record: PolicyRecord, name: str, env: Environment, items: int) -> EvalEvent:
        settings: EnvironmentConfig = self.config.evaluation[name]
        plan = self.config.evaluate
        started_ns = time.time_ns()
        client = await self.directory.current()
        if await client.weight_version() != record.version:
            with traced_update(self.service, self.config.training.name, record.policy_version):
                await client.update_weights(record.weights, record.version)
        result = await evaluate(
            env,
            client,
            k=plan.samples,
            temperature=settings.temperature,
            items=range(items),
            greedy=items == min(plan.items, len(env)),
            max_tokens=settings.max_new_tokens,
            seed=self.config.seed,
            policy_version=record.version,
            concurrency=settings.concurrency,
            config=CollectConfig(request_timeout_s=settings.timeout_s),
        )
        if result.avg_at_k is None or result.pass_at_k is None:
            raise DataError(f"environment {name} judged none of {items} items")
        return EvalEvent(
            run=self.service.run,
            env=name,
            revision=self.service.revision,
            policy_version=record.version,
            policy_step=record.policy_version.step,
            items=result.items,
            k=result.k,
            temperature=result.temperature,
            avg=result.avg_at_k,
            pass_at_k=result.pass_at_k,
            greedy=result.greedy,
            unjudged=result.unjudged,
            started_ns=started_ns,
            ended_ns=time.time_ns(),
        )

    async def _publish(self, event: EvalEvent) -> None:
        subject = subjects.event("eval", event.run, event.revision, event.env)
        msg_id = f"eval.{event.run}.{event.env}.{event.policy_version}"
        async for attempt in self.service.retrying(f"publish {subject}"):
            with attempt:
                await self.service.bus.publish(subject, encode(event), msg_id=msg_id)
        vitals = self.service.vitals
        vitals.handled += 1
        vitals.emitted += 1
        vitals.process.record((event.ended_ns - event.started_ns) / 1e9)
        vitals.metrics |= {
            f"eval/{event.env}/avg@{event.k}": event.avg,
            f"eval/{event.env}/pass@{event.k}": event.pass_at_k,
            f"eval/{event.env}/step": float(event.policy_step),
        }
        if event.greedy is not None:
            vitals.metrics[f"eval/{event.env}/greedy"] = event.greedy
