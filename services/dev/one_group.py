"""`lachesis dev`: takes one group from its task to an optimizer step, through all stages, here.

The environment, the governor, the scorer, the normalizer and the batcher are the ones that services run, on a bus in
memory. The policy answers on a port of this process. The trainer's side is its feed, its packing and its optimizer
step. Nothing is written into the run's folder.

Guarantees that it ends: with the group's outcome from the ledger, or with the first failure of the environment's code,
or when a rater stays unavailable. Code that never returns is the concern of `debugging`.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import torch
from rich.console import Console

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.tokenizer_hash import probe_of
from lachesis.pipeline.config.evaluation_sources import is_held_out
from lachesis.pipeline.config.extended import training_config_type
from lachesis.pipeline.config.run import EvaluationConfig, RunConfig
from lachesis.pipeline.config.trainer_settings import trainer_settings
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.environment.stage import SingleGroup, run_environment
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.pipeline.inference.config import EngineConfig
from lachesis.pipeline.inference.directory import register
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.model.context import check_positions
from lachesis.pipeline.model.end_tokens import end_tokens
from lachesis.pipeline.model.policy import PolicyModel, load_model
from lachesis.pipeline.model.tensors import policy_tensors, policy_version, vocabulary_of
from lachesis.pipeline.runtime.http import HttpServer
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.teacher.config import TeacherConfig
from lachesis.pipeline.trainer.adapter_targets import adapter_problem
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.finite_step import step_on_finite_groups
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.model_setup import model_setup
from lachesis.pipeline.trainer.sequences import trainer_limits
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat, PolicyRecord
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import LedgerEntry
from lachesis.services.dev.printed_group import print_group
from lachesis.services.dev.stages import open_stages, run_stage
from lachesis.services.dev.tracebacks import awaited_calls
from lachesis.services.stage_settings import environment_settings, policy_context

__all__ = ["one_group_config", "run_dev", "trace_group"]

log = logging.getLogger("lachesis")

_FOLDER = "dev"
"""Is not there, and nothing is written into it: checkpoints of the run are no concern of this one's ledger."""
_LEASE_S = 24 * 3600.0
"""As long as anybody stays at a breakpoint."""
_NO_BUDGET_BYTES = 1 << 50
_HOST = "127.0.0.1"
_BUSY_BEATS = 10
"""Heartbeats, one a second, after which a service that is still at the same group is named."""


async def run_dev(config: RunConfig, name: str, index: int, console: Console, bus: Bus | None = None) -> bool:
    """Generate one group of task `index`, rate it, and take one optimizer step on it; print all of it.

    `bus`: an empty one, a new one in memory by default. Return whether there was anything to train on.
    """
    if config.model is None:
        raise ConfigError("model: not set; name a local folder or a Hugging Face id")
    _check_environment(config, name)
    torch.set_num_threads(config.training.threads)
    setup = model_setup(trainer_settings(config), torch.device("cpu"))
    policy = load_model(config.model, setup)
    check_positions(policy_context(config), policy.model.config)
    if setup.lora is not None and (problem := adapter_problem(policy.model, setup.lora)) is not None:
        raise ConfigError(problem)
    bus = bus or MemoryBus(max_bytes=_NO_BUDGET_BYTES)
    async with _serve_policy(policy, config.path / _FOLDER, config.role("policy").engine) as url:
        feed = await BatchFeed.open(bus, config.run, config.training.name, term="dev")
        await feed.publish_policy(_policy_record(config, policy))
        await register(bus, config.run, "policy", url)
        own = one_group_config(config, name)
        try:
            entry = await trace_group(bus, own, name, SingleGroup(index, config.seed))
        except (EnvironmentCodeError, DataError, InfrastructureError) as error:
            console.print(f"no group: {error}")
            return False
        await print_group(console, bus, own, entry)
        if entry.batch is None:
            return False
        async with aclosing(feed.batches()) as batches:
            batch = await anext(batches)
    settings = config.training.learner
    limits = trainer_limits(policy.tokenizer_hash, vocabulary_of(policy.model), config.training.reads, settings)
    learner = Learner(policy.model, settings)
    learner.inputs = load_inputs(config.training.inputs, policy, learner.trained)
    _, step, _ = step_on_finite_groups(
        learner, batch.select(limits, inputs=learner.inputs), policy.tokenizer.pad_token_id or 0
    )
    console.print(
        f"optimizer step: loss {step.loss:.4g}, grad norm {step.grad_norm:.3g}, entropy {step.entropy:.3g}, "
        f"{step.trainable_tokens} trainable tokens of {step.tokens}, {step.seconds:.2f} s"
    )
    return True


def _check_environment(config: RunConfig, name: str) -> None:
    settings = config.environments.get(name)
    if settings is None:
        raise ConfigError(f"environments.{name}: not configured; known: {', '.join(config.environments) or 'none'}")
    if settings.is_foreign:
        raise ConfigError(f"environments.{name}: its kind is {settings.kind}, so its rollouts are generated elsewhere")


def one_group_config(config: RunConfig, name: str) -> RunConfig:
    """Return the configuration of a run that ends with one group of `name`.

    The group is the batch. Raters are called one at a time, so that two breakpoints do not ask for input at once, and
    once for each sample. What becomes scores, rewards and advantages is as it was.
    """
    settings = config.environments[name]
    scoring = settings.scoring and _one_call_at_a_time(settings.scoring)
    return msgspec.structs.replace(
        config,
        folder=str(config.path / _FOLDER),
        mode="train",
        environments={name: msgspec.structs.replace(settings, concurrency=1, scoring=scoring)},
        scoring=_one_call_at_a_time(config.scoring),
        inference={},
        evaluate=config.evaluate if is_held_out(config, name) else EvaluationConfig(held_out=0.0),
        evaluation={},
        curriculum=CurriculumConfig(),
        teacher=TeacherConfig(),
        batching=msgspec.structs.replace(
            config.batching,
            batch_size=settings.samples,
            max_staleness=0,
            token_budget=None,
            teacher="off",
            score_deadline_s=None,
        ),
        flow=msgspec.structs.replace(config.flow, lease_s=_LEASE_S),
        training=training_config_type()(
            name=config.training.name,
            learner=LearnerConfig(temperature=config.training.learner.temperature),
            inputs=config.training.inputs,
        ),
    )


def _one_call_at_a_time(scoring: ScoringConfig) -> ScoringConfig:
    return msgspec.structs.replace(
        scoring,
        raters=[msgspec.structs.replace(rater, concurrency=1) for rater in scoring.raters],
        fixed_samples=0.0,
    )


def _policy_record(config: RunConfig, policy: PolicyModel) -> PolicyRecord:
    """Return what a trainer says of its first weights. No file holds them: the server has them already."""
    return PolicyRecord(
        run=config.run,
        version=str(_version(policy)),
        weights="",
        tokenizer_hash=policy.tokenizer_hash,
        written_ns=time.time_ns(),
        vocabulary=vocabulary_of(policy.model),
        earlier=[],
        token_probe=probe_of(policy.tokenizer, vocabulary_of(policy.model)),
    )


def _version(policy: PolicyModel) -> PolicyVersion:
    return policy_version(0, "dev", policy_tensors(policy.model))


@asynccontextmanager
async def _serve_policy(policy: PolicyModel, folder: Path, limits: EngineConfig) -> AsyncIterator[str]:
    """Serve the policy on a free port of this machine and yield the URL. No proxy is to stand in between."""
    os.environ["no_proxy"] = ",".join(filter(None, (os.environ.get("no_proxy", os.environ.get("NO_PROXY")), _HOST)))
    version = str(_version(policy))
    with (
        socket.create_server((_HOST, 0)) as listener,
        Engine(
            policy.model,
            eos_token_id=end_tokens(policy.model, policy.tokenizer),
            weight_version=version,
            config=limits,
            decode=policy.tokenizer.decode,
        ) as engine,
    ):
        token = secrets.token_hex(16)  # no client has it: these weights stay
        app = build_app(policy, engine, model_name="policy", weights_folder=folder, token=token, hosts={_HOST})
        server = HttpServer.over(app, grace_s=1)
        async with background() as tasks:
            tasks.start_soon(server.serve_until_cancelled, [listener])
            yield f"http://{_HOST}:{listener.getsockname()[1]}"


async def trace_group(bus: Bus, config: RunConfig, name: str, single: SingleGroup) -> LedgerEntry:
    """Let the stages make one group and decide on it. Return the ledger entry that says what became of it.

    Raises what fails the environment, and `InfrastructureError` once a rater stayed unavailable for
    `scoring.patience_s` seconds.
    """
    async with open_stages(bus, config) as tasks:
        tasks.start_soon(_watch_services, bus, config.run)
        tasks.start_soon(
            run_stage,
            bus,
            config,
            f"environment-{name}",
            lambda service: run_environment(service, environment_settings(config, name), name, single=single),
        )
        async with aclosing(follow_ledger(bus, config.run, config.training.name, LedgerPosition())) as entries:
            decision = await anext(entry async for entry in entries if entry.batch is not None or entry.outcomes)
    return decision


async def _watch_services(bus: Bus, run: str) -> None:
    """Say what the services wait for and what takes long, and end a wait that only other servers can end."""
    said: dict[str, str | None] = {}
    busy: dict[str, int] = {}
    async with bus.listen(subjects.heartbeat(run)) as messages:
        async for message in messages:
            beat = decode(Heartbeat, message.data)
            note = beat.stage.note if beat.stage.state == "waiting" else None
            if beat.stage.given_back:
                raise InfrastructureError(f"{beat.service}: {note or 'something that it needs is unavailable'}")
            if note is not None and note != said.get(beat.service):
                log.warning("%s waits: %s", beat.service, note)
            said[beat.service] = note
            busy[beat.service] = busy.get(beat.service, 0) + 1 if beat.stage.in_flight else 0
            if busy[beat.service] % _BUSY_BEATS == _BUSY_BEATS - 1:
                calls = "".join(f"\n{stack.rstrip()}" for stack in awaited_calls())
                log.warning("%s is still at its group%s", beat.service, calls and f", which waits here:{calls}")
