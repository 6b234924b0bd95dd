"""Loads the environments, raters and curriculum that a configuration names, in a process of its own.

That code is the user's: it may print, hang or end its process. Guarantees a finding for each setting within the time
given, whatever the code does, and that nothing of it stays in the caller's process.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal

import anyio
import msgspec
import numpy as np
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.evaluation_sources import held_out_tasks, is_held_out
from lachesis.pipeline.config.run import THIS_MACHINE, EnvironmentConfig, RunConfig
from lachesis.pipeline.config.trainer_settings import open_trackers, trainer_settings
from lachesis.pipeline.curriculum.drawn_environments import curriculum_environments
from lachesis.pipeline.curriculum.logic.registry import load_strategy
from lachesis.pipeline.curriculum.logic.strategy import ItemPool
from lachesis.pipeline.environment.group_environment import GroupEnvironment
from lachesis.pipeline.environment.load import item_keys_of, load_environment
from lachesis.pipeline.environment.probe import probe_environment
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.extension import load_place, wanted_trackers
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import load_estimator
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.pipeline.scorer.scorer import EnvironmentScorer, load_scorer
from lachesis.pipeline.tasks.held_out import reason_none_held_out
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.services.preflight.devices import devices_here
from lachesis.services.preflight.load_findings import LoadFinding
from lachesis.services.preflight.model_loading import model_loads
from lachesis.services.preflight.named_in_config import NamedModel, named_models
from lachesis.services.preflight.prompts import PolicyPrompts
from lachesis.services.stage_settings import curriculum_settings, scoring_settings

__all__ = ["check_loads", "write_findings"]

_MAX_LINE_BYTES = 1 << 16
_MAX_TEXT = 2000
_TAIL_LINES = 8
_END_S = 15.0
"""Seconds in which the reaper of the loading process ends that and all below it."""
_TRIED_ITEMS = 2000
"""Tasks of a pool, evenly spread, from which the curriculum's strategy is made."""
_SETUP_S = 20.0
"""Seconds in which the process of an environment that has one of its own is to be ready."""
_MANY_TASKS = 20_000
"""From here on a run meets a task a few times at most; see `pipeline/curriculum/README.md`."""


def write_findings(config: RunConfig, out: BinaryIO, *, models: bool = False, prompts: bool = False) -> None:
    """Load everything, and write a line of JSON to `out` when each begins and when it ends.

    What cannot be loaded has one finding: nothing else is tried with it.

    `models`: check the models, too, and sample a token of each that is to be served and whose check did not fail.
    `prompts`: look through the prompts, too, as the policy's chat template renders them.
    """
    failed: dict[str, str] = {}  # by setting, what was wrong
    devices = ("devices", partial(devices_here, config))
    further = [
        *(([devices], _models(config), model_loads(config, failed)) if models else ()),
        *([_prompts(config, failed)] if prompts else ()),
    ]
    for setting, load in chain(_load_checks(config, failed), *further):
        _write(out, LoadFinding(setting=setting, state="begun"))
        started = time.monotonic()
        state: Literal["ok", "failed", "doubtful"] = "ok"
        try:
            text = load()
        except _DoubtError as error:
            state, text = "doubtful", str(error)
        except LachesisError as error:
            state, text = "failed", str(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code; it is reported, not handled
            state, text = "failed", _describe(error)
        seconds = time.monotonic() - started
        if state == "failed":
            failed[setting] = text
        _write(out, LoadFinding(setting=setting, state=state, text=text[:_MAX_TEXT], seconds=seconds))


def _write(out: BinaryIO, finding: LoadFinding) -> None:
    out.write(msgspec.json.encode(finding) + b"\n")
    out.flush()


def _load_checks(config: RunConfig, failed: Container[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    for table, named in (("environments", config.environments), ("evaluation", config.evaluation)):
        for name, env in named.items():
            if not env.is_foreign:
                yield f"{table}.{name}", _environment(config, name, env)
    yield "scoring", _ensemble(partial(EnvironmentScorer, config.scoring, None))
    for name, env in config.environments.items():
        own = env.success_rater is not None or config.advantage_of(name).weights
        if env.scoring is not None or (own and "scoring" not in failed):
            yield f"environments.{name}.scoring", _ensemble(partial(load_scorer, scoring_settings(config)[name], name))
    for name, env in config.evaluation.items():
        if env.scoring is not None or (env.success_rater is not None and "scoring" not in failed):
            scoring, settings = env.scoring or config.scoring, env
            yield f"evaluation.{name}.scoring", _ensemble(partial(EnvironmentScorer, scoring, settings))
    for name in config.environments:
        advantage = config.advantage_of(name)
        if advantage.estimator not in ESTIMATORS or f"environments.{name}" not in failed:
            yield f"environments.{name}.advantage", partial(_estimator, advantage)
    for name, env in config.environments.items():
        if not env.is_foreign and f"environments.{name}" not in failed:
            yield f"environments.{name}, tried", partial(_try, config, name)
    learned = curriculum_environments(curriculum_settings(config))
    drawn = [name for name in learned if f"environments.{name}" not in failed]
    yield "curriculum.strategy", partial(_strategy, config, drawn)
    yield from _away(config)


def _away(config: RunConfig) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield for each tracker of the run's trainer, and for its back end, the setting and what tries it."""
    if config.mode != "train":
        return
    for setting in wanted_trackers(config):
        yield setting, partial(_tracker, config, setting)
    backend = config.trains_elsewhere("trainer", "")
    if backend is not None and backend.tries is not None:
        yield f"training.{config.training.backend}", partial(_backend, config, backend.tries)


def _tracker(config: RunConfig, setting: str) -> str:
    try:
        tracker = next(one for one in open_trackers(config, only=setting))
    except (StartupError, ModuleNotFoundError) as error:
        return f"not tried: {error}"  # the missing extra has a finding of its own
    try:
        return tracker.check()
    except InfrastructureError as error:
        raise _DoubtError(f"{error}; training goes on without it, and figures wait") from error


def _backend(config: RunConfig, tries: str) -> str:
    try:
        return load_place(tries)(config)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        return f"not tried: needs {error.name}"  # the missing extra has a finding of its own
    except InfrastructureError as error:
        raise _DoubtError(f"{error}; training waits for it") from error


def _models(config: RunConfig) -> Iterator[tuple[str, Callable[[], str]]]:
    if config.training.backend != THIS_MACHINE and config.mode == "train":
        return
    for setting, one in named_models(config).items():
        if one.weights:
            yield setting, partial(_model, config, setting, one)


def _model(config: RunConfig, setting: str, named: NamedModel) -> str:
    try:
        import torch

        from lachesis.pipeline.model.context import untrainable_positions
        from lachesis.pipeline.model.model_check import check_model
        from lachesis.pipeline.model.policy import ModelSetup
        from lachesis.pipeline.trainer.adapter_targets import adapter_problem
        from lachesis.pipeline.trainer.model_setup import model_setup
        from lachesis.pipeline.trainer.packing import predict_packing
        from lachesis.services.stage_settings import policy_context
    except ModuleNotFoundError as error:
        return f"not checked: needs {error.name}; {install_command('train')}"
    trained = setting == "model" and config.mode == "train"
    setup = (
        model_setup(trainer_settings(config), torch.device("cpu"))
        if trained
        else ModelSetup(
            tokenizer=named.own_tokenizer,
            chat_template=named.own_template,
            exceptions=tuple(config.model_exceptions),
        )
    )
    lora, rows = setup.lora, []

    def problem_of(model: Any) -> str | None:
        if trained:
            rows.append(predict_packing(config.training.learner.packing, model, config.training.inputs))
        problem = None if lora is None else adapter_problem(model, lora)
        return problem or (untrainable_positions(policy_context(config), model.config) if trained else None)

    checked = "; ".join([check_model(named.name, setup, problem_of), *rows])
    if trained and config.training.sharding == "none":  # what `lachesis plan` knows
        _doubt_large_step(config)
    return checked


def _doubt_large_step(config: RunConfig) -> None:
    """Raise `_DoubtError` where an optimizer step takes more memory than there is."""
    from lachesis.services.run.memory_plan import plan_step

    plan = plan_step(config, model=None, device=None, memory=None)
    if not plan.fits:
        raise _DoubtError(f"{plan.text}. What helps: {'; '.join(plan.cures)}")


def _environment(config: RunConfig, name: str, settings: EnvironmentConfig) -> Callable[[], str]:
    def load() -> str:
        env = load_environment(settings.kind, settings.params)
        first = env.task(0)
        if name not in config.environments:
            if env.doubts:
                raise _DoubtError("; ".join([*env.doubts, f"{len(env)} tasks"]))
            return f"{len(env)} tasks"
        text = f"{len(env)} tasks"
        if is_held_out(config, name):
            held_out = len(held_out_tasks(config, name, item_keys_of(env)).tasks)
            none = reason_none_held_out(name, len(env), most=config.evaluate.items)
            text += f", {held_out} of them held out" if held_out else f"; {none}"
        if len(env) > _MANY_TASKS and first.difficulty is None and config.curriculum.strategy == "irt":
            text += '; so many without a difficulty are learned faster with curriculum.strategy = "epoch" than with irt'
        if env.doubts:
            raise _DoubtError("; ".join([*env.doubts, text]))
        return text

    return load


def _prompts(config: RunConfig, failed: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], str]]]:
    policy = PolicyPrompts(config)

    def look(name: str) -> str:
        try:
            found = anyio.run(policy.check, name)
        except ModuleNotFoundError as error:
            return f"not looked at: tokenizers need the package {error.name!r}"
        except LachesisError as error:
            if str(error) in failed.values():
                return "not looked at, since the tokenizer cannot be loaded"
            raise
        text = "; ".join(problem.text for problem in found.problems)
        if any(problem.fatal for problem in found.problems):
            raise ConfigError(text)
        if found.problems:
            raise _DoubtError(f"{text}; {found.text}")
        return found.text

    for name, env in config.environments.items():
        if policy.known and not env.is_foreign and f"environments.{name}" not in failed:
            yield f"environments.{name}, prompts", partial(look, name)


class _DoubtError(Exception):
    """Raised when what was loaded failed on every answer that it was tried on; others may fare better."""


def _try(config: RunConfig, name: str) -> str:
    """Try an environment and its raters on scripted answers. Raises `ConfigError`, or `_DoubtError`, if they fail."""
    settings = config.environments[name]
    try:
        env = load_environment(settings.kind, settings.params)
        scorer = load_scorer(scoring_settings(config)[name], name, explains=True)
    except Exception:  # noqa: BLE001 - the user's code; it has a finding of its own
        return "not tried, since it cannot be loaded"
    if isinstance(env, GroupEnvironment):
        return _set_up(env)
    found = anyio.run(partial(probe_environment, env, name, scorer, may_force=_may_force(config)))
    text = "; ".join(finding.text for finding in found)
    if any(finding.sure for finding in found):
        raise ConfigError(text)
    if found:
        raise _DoubtError(text)
    return "its code and its raters work on scripted answers"


def _may_force(config: RunConfig) -> bool:
    """Return whether the policy's server may serve requests that force what an answer must match."""
    policy = config.role("policy")
    is_another = policy.url is not None or config.trains_elsewhere("inference", "policy") is not None
    return is_another or policy.spec.constrains_answers


def _set_up(env: GroupEnvironment) -> str:
    """Start the process of an environment whose own code generates, and end it.

    Raises what `check_setup` raises, `ConfigError` where the process ends, and `_DoubtError` where it is not ready in
    time.
    """

    async def within_limit() -> None:
        with anyio.fail_after(_SETUP_S):
            await env.check_setup()

    untried = "no answer was tried: its own code generates, with a model's tokens"
    try:
        anyio.run(within_limit)
    except TimeoutError as error:
        raise _DoubtError(f"its process was not ready after {_SETUP_S:g} s, and was ended; {untried}") from error
    except InfrastructureError as error:
        raise ConfigError(f"{error}; `lachesis env verify` shows what it wrote") from error
    return f"its process starts; {untried}"


def _strategy(config: RunConfig, names: Sequence[str]) -> str:
    """Make the strategy for the tasks of each environment that has some of its own, or for made-up ones."""
    pools = {name: _some_items(config.environments[name]) for name in names if not config.environments[name].is_foreign}
    known = {name: pool for name, pool in pools.items() if pool is not None}
    if not known:
        any_pool = ItemPool(_TRIED_ITEMS, difficulty=np.arange(_TRIED_ITEMS, dtype=np.float64))
        return type(load_strategy(any_pool, config.curriculum)).__name__
    for name, pool in known.items():
        try:
            made = load_strategy(pool, config.curriculum)
        except ConfigError as error:
            raise ConfigError(f"environment {name}: {error}") from error
    return type(made).__name__


def _some_items(settings: EnvironmentConfig) -> ItemPool | None:
    """Return items with the difficulties of some tasks, evenly spread; None where these say too little of all."""
    try:
        env = load_environment(settings.kind, settings.params)
        places = np.unique(np.linspace(0, len(env) - 1, min(len(env), _TRIED_ITEMS)).astype(int)).tolist()
        found = [env.task(place).difficulty for place in places]
    except Exception:  # noqa: BLE001 - the user's code; it has a finding of its own
        return None
    told = [one for one in found if one is not None]
    if len(told) < len(found):
        return ItemPool(len(found))
    if len(found) < len(env) and len(set(told)) == 1:
        return None  # the others may have another one
    return ItemPool(len(found), difficulty=np.array(told, np.float64))


def _estimator(advantage: AdvantageConfig) -> str:
    return load_estimator(advantage).name


def _ensemble(load: Callable[[], EnvironmentScorer]) -> Callable[[], str]:
    def describe() -> str:
        return ", ".join(load().versions) or "no raters: the environments' own rewards count"

    return describe


def _describe(error: BaseException) -> str:
    """Return an exception of the user's code with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


async def check_loads(
    arguments: Sequence[str], *, timeout_s: float, models: bool = False, prompts: bool = False
) -> list[LoadFinding]:
    """Return a finding for each thing that the configuration of `arguments` (--config, --set) names.

    `models` and `prompts`: as in `write_findings`.

    The one that is being loaded after `timeout_s` seconds is late; those after it are left out.
    """
    further = [*["--models"] * models, *["--prompts"] * prompts]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reaper = "--reaper", str(theirs.fileno())
    command = [sys.executable, "-P", "-m", "lachesis", "load-check", *arguments, *further, *reaper]
    found: dict[str, LoadFinding] = {}
    late = True
    with ours:
        with theirs:
            process = await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        async with process:
            said = bytearray()
            try:
                with anyio.move_on_after(timeout_s):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(_keep_tail, process.stderr, said)
                        await _read(process.stdout, found)
                        await process.wait()
                    late = False
            finally:
                ours.close()  # so the reaper ends what still runs, and what the code has started
                with anyio.CancelScope(shield=True), anyio.move_on_after(_END_S):
                    await process.wait()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it was still importing
    return [_concluded(one, late=late, code=process.returncode, said=bytes(said)) for one in found.values()]


async def _read(stream: anyio.abc.ByteReceiveStream | None, found: dict[str, LoadFinding]) -> None:
    if stream is None:
        return
    lines = BufferedByteReceiveStream(stream)
    with suppress(anyio.IncompleteRead):
        while True:
            line = await lines.receive_until(b"\n", _MAX_LINE_BYTES)
            finding = msgspec.json.decode(line, type=LoadFinding)
            found[finding.setting] = finding


async def _keep_tail(stream: anyio.abc.ByteReceiveStream | None, said: bytearray) -> None:
    if stream is not None:
        async for part in stream:
            said += part
            del said[:-_MAX_LINE_BYTES]


def _concluded(finding: LoadFinding, *, late: bool, code: int | None, said: bytes) -> LoadFinding:
    if finding.state != "begun":
        return finding
    if late:
        return msgspec.structs.replace(finding, state="late")
    tail = "\n".join(said.decode(errors="replace").splitlines()[-_TAIL_LINES:])
    return msgspec.structs.replace(finding, state="failed", text=f"loading it ended its process (code {code}): {tail}")
