"""The tools of agents as plain functions, which return values for JSON and raise errors for people.

What a command of `lachesis` does already is that command, in a process of its own (`commands`). Names and arguments of
the first ten are those that users of other agent tools know.
"""

import difflib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.private_file import write_private
from lachesis.pipeline.common.secrets import masked
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.config.load import LoadedConfig
from lachesis.pipeline.config.policy import ConfigPolicy
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.toml import to_toml
from lachesis.pipeline.errors import NotFoundError, StartupError
from lachesis.pipeline.notices.text import notice_lines
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.values import from_json
from lachesis.services.agent.catalog import CatalogEntry, list_environments, select_environment
from lachesis.services.agent.commands import call_command
from lachesis.services.agent.draft import RunDraft, values_by_path
from lachesis.services.observe.run_logs import log_files
from lachesis.services.observe.run_results import printed_results, results_of
from lachesis.services.observe.run_state import RunState
from lachesis.services.observe.runs import look_at_folder, look_at_runs
from lachesis.services.observe.summary import SUMMARY_FILE, read_steps
from lachesis.services.supervisor.detached import start_run, stop_run

__all__ = ["MAX_RUNS", "AgentTools"]

_OPENROUTER_KEY = "OPENROUTER_API_KEY"
_HISTORY = 10
"""Steps that the results of a run show, evenly spaced."""
_HISTORY_FIGURES = frozenset({"train/step", "reward/mean", "staleness/mean", "latency/e2e/rolling_p99"})
"""Figures of a step that they show, in addition to held-out rates."""
_NANOSECONDS = 1e9
MAX_RUNS = 8
"""Runs of this machine that are live at once, if the operator says nothing else."""
_MAX_COMMANDS = 4
"""Commands that the tools run at once; others wait."""
_MAX_TEST_STEPS = 100
_MAX_TEST_SAMPLES = 256
_MAX_RATINGS = 32
_MAX_MODELS = 16
_MAX_NAMED_RUNS = 8
_MAX_SETTINGS = 100
_MAX_ARGUMENT_CHARS = 4096
_MAX_INTEGER = (1 << 53) - 1

Load = Callable[[str, Sequence[str]], LoadedConfig[RunConfig]]


class AgentTools:
    """The tools of one agent. `load`: returns the configuration of the run of a name, with settings changed.

    `file` and `sets`: what every run begins with; `folders`: where environments are looked for. `key_envs`: variables
    of this process with keys that may be sent to servers which the agent names. `max_runs`: live runs of this machine
    from which on no further one is started. `pythons`: by kind an interpreter for foreign classes.
    """

    def __init__(
        self,
        file: Path | None,
        sets: Sequence[str],
        policy: ConfigPolicy,
        folders: Sequence[Path],
        load: Load,
        *,
        key_envs: Collection[str] = (),
        max_runs: int = MAX_RUNS,
        pythons: Mapping[str, str] | None = None,
    ) -> None:
        self._draft = RunDraft(file, tuple(sets), policy)
        self._folders = list(folders)
        self._load = load
        self._key_envs = key_envs
        self._max_runs = max_runs
        self._pythons = {kind: str(Path(python).absolute()) for kind, python in (pythons or {}).items()}
        self._starting = anyio.Lock()
        self._commands = anyio.CapacityLimiter(_MAX_COMMANDS)

    async def rl_list_environments(self) -> dict[str, Any]:
        """List the environments that can be trained on, with name, file, docstring and own settings.

        Read the file of one to learn how its tasks are made and scored.
        """
        entries = await self._entries()
        return {
            "environments": [msgspec.to_builtins(entry) for entry in entries],
            "count": len(entries),
            "tip": "rl_select_environment(name) selects one.",
        }

    async def rl_select_environment(self, name: str) -> dict[str, Any]:
        """Select the environment to train on, and begin with its default settings.

        Then rl_get_current_config shows the settings, and rl_edit_config changes them.
        """
        entry = select_environment(name, await self._entries())
        self._draft.select(entry)
        said = {"message": f"Selected environment: {name}", "environment": name, "file_path": entry.file_path}
        return said if entry.note is None else {**said, "note": entry.note}

    async def rl_get_current_config(self, section: str = "") -> dict[str, Any]:
        """Show the settings of the selected environment's run: type, value, default, limits and meaning.

        Without `section` the common ones; with one, such as "training" or "training.learner", all below it. Locked ones
        cannot be changed.
        """
        fields = self._draft.fields(section)
        return {
            "environment": self._entry().name,
            "configurable_fields": [msgspec.to_builtins(field) for field in fields if not field.locked],
            "locked_fields": [
                {**msgspec.to_builtins(field), "locked_value": field.current_value} for field in fields if field.locked
            ],
            "sections": self._draft.sections(),
            "tip": "rl_edit_config(field, value) changes a configurable one; section=... shows more.",
        }

    async def rl_edit_config(self, field: str, value: Any) -> dict[str, Any]:
        """Change one setting, by its name in rl_get_current_config. null takes an earlier change back."""
        path = self._draft.edit(field, value)
        return {
            "message": f"Updated {path} = {masked(path, value)!r}" if value is not None else f"{path} is as before",
            "field": path,
            "value": masked(path, value),
            "config": masked("", self._draft.edits),
        }

    async def rl_start_training(self) -> dict[str, Any]:
        """Start a run with the selected environment and settings. It goes on without this server.

        Returns once it has begun: rl_check_status(run_id) says how far it is. What keeps it from starting is the error.
        """
        config = self._draft.config_to_start(datetime.now(UTC))
        async with self._starting:
            live = [one.run for one in await anyio.to_thread.run_sync(look_at_runs) if one.is_live]
            if len(live) >= self._max_runs:
                raise StartupError(
                    f"{len(live)} runs are live on this machine ({', '.join(live)}), and {self._max_runs} are the most "
                    "that the operator lets agents have: stop one with rl_stop_training"
                )
            with _written(config) as file:
                found = await start_run(config, ["--config", file], lambda _: None, wait=False)
        return {
            "run_id": found.run,
            "status": found.state,
            "environment": self._entry().name,
            "config": masked("", self._draft.edits),
            "config_path": str(config.path / "run.toml"),
            "folder": found.folder,
            "logs": _logs(found),
            "trackers": found.trackers,
            "message": f"Starting. rl_check_status({found.run!r}) answers at once, as often as you like.",
        }

    async def rl_check_status(self, run_id: str) -> dict[str, Any]:
        """Report at once how a run stands: processes, step, rewards, held-out rates, staleness, p99, logs.

        `notices`: what stands in the way of the run or harms it, since when, why, and what to do. `outcomes`: what
        became of its groups, such as batched (trained on), stale, zero_variance (all answers of a group scored alike).
        """
        found = self._overview(run_id)
        return _status(found)

    async def rl_stop_training(self, run_id: str) -> dict[str, Any]:
        """Stop a run in order. Nothing is lost; `lachesis runs start` goes on with it."""
        before = self._overview(run_id)
        if not before.is_live:
            return {"message": f"Run {run_id!r} is not running (status: {before.state})", "run_id": run_id}
        found = await stop_run(run_id, Path(before.folder), lambda _: None)
        return {"message": f"Stopped training run {run_id!r}", "run_id": run_id, "status": found.state}

    async def rl_get_results(self, run_id: str) -> dict[str, Any]:
        """Show the results of a run, or those so far: rewards, held-out rates, checkpoint, some steps."""
        self._overview(run_id)
        config = self._load(run_id, ()).config
        results = await anyio.to_thread.run_sync(results_of, config)
        steps = await anyio.to_thread.run_sync(read_steps, config.path)
        stride = max(1, -(-len(steps) // _HISTORY))
        shown = [
            {name: value for name, value in figures.items() if name in _HISTORY_FIGURES or name.startswith("eval/")}
            for figures in steps[::-1][::stride][::-1]
        ]
        return {"run_id": run_id, **msgspec.to_builtins(printed_results(results)), "history": shown}

    async def rl_list_runs(self) -> dict[str, Any]:
        """List the runs of this machine, the newest first, with their states."""
        runs = await anyio.to_thread.run_sync(look_at_runs)
        rows = [
            {
                "run_id": one.run,
                "environment": ", ".join(one.environments) or None,
                "status": one.state,
                "step": one.step,
                "steps": one.steps,
                "folder": one.folder,
            }
            for one in runs
        ]
        return {"runs": rows, "count": len(rows)}

    async def rl_test_inference(
        self,
        num_steps: int = 3,
        group_size: int = 16,
        models: list[str] | None = None,
        server: str | None = None,
        key_env: str | None = None,
    ) -> dict[str, Any]:
        """Ask models for answers to some tasks of the selected environment, and rate them, before a run.

        `models`: folders of local models, or names at `server` (an OpenAI-compatible URL up to /v1; its key is in the
        variable `key_env`, one that the operator allows), by default at OpenRouter with OPENROUTER_API_KEY. Without
        models: the run's own model.
        """
        if key_env is not None and key_env not in self._key_envs:
            allowed = ", ".join(self._key_envs) or "none"
            raise ConfigError(
                f"key_env: no variable is sent to a server but those that the operator allows with --key-env: {allowed}"
            )
        _check_bound("num_steps", num_steps, _MAX_TEST_STEPS)
        _check_bound("group_size", group_size, _MAX_TEST_SAMPLES)
        _check_bound("models", len(models or "1"), _MAX_MODELS)
        _check_bound("characters of a model", max(map(len, models or "1")) or 1, _MAX_ARGUMENT_CHARS)
        config = self._draft.config()
        arguments = _models(models, server, config.model, key_env)
        with _written(config) as file:
            return {
                "environment": self._entry().name,
                **await self._run_command(
                    *("env", "test", "--config", file, "--env", self._entry().section),
                    *("--steps", str(num_steps), "--samples", str(group_size), "--json", *arguments),
                    codes=(0, 1),
                ),
            }

    async def rl_health(self, run_id: str) -> dict[str, Any]:
        """Show what the health checks found in a run, and whether an environment is quarantined or halted."""
        return {"run_id": run_id, "environments": await self._call(run_id, "health", codes=(0, 1))}

    async def rl_list_rollouts(
        self,
        run_id: str,
        *,
        env: str | None = None,
        state: str | None = None,
        item: str | None = None,
        text: str | None = None,
        score: str | None = None,
        disagreement: str | None = None,
        advantage: str | None = None,
        step: str | None = None,
        policy_step: str | None = None,
        rating: list[str] | None = None,
        highest: str | None = None,
        lowest: str | None = None,
        limit: int = 20,
        before: int | None = None,
    ) -> dict[str, Any]:
        """List groups of rollouts, the newest first, or those that a rater rates highest or lowest.

        `score`, `disagreement`, `advantage`, `step` and `policy_step` are ranges such as "0.9:" or ":0.1", and `rating`
        holds ranges of single raters: ["numeric=0.5:"]. `highest`, `lowest`: a rater, or score, disagreement or
        advantage. `state`: trained, batched, stale, zero_variance and so on. `text` is in a prompt or an answer.
        `before`: the sequence from which the next page goes on.
        """
        given = {
            "--env": env, "--state": state, "--item": item, "--text": text, "--score": score,
            "--disagreement": disagreement, "--advantage": advantage, "--step": step, "--policy-step": policy_step,
            "--highest": highest, "--lowest": lowest, "--limit": limit, "--before": before,
        }  # fmt: skip
        _check_bound("ratings", len(rating or "1"), _MAX_RATINGS)
        for name in ("--limit", "--before"):
            if (number := given[name]) is not None:
                _check_bound(name.strip("-"), int(number), _MAX_INTEGER)
        options = [f"{name}={value}" for name, value in given.items() if value is not None]
        options += [f"--rating={one}" for one in rating or ()]
        groups = await self._call(run_id, "rollouts", *options, lines=True)
        named = [one.partition("=")[0] for one in rating or ()] + [one for one in (highest, lowest) if one is not None]
        if groups or not named:
            return {"run_id": run_id, "groups": groups}
        return {"run_id": run_id, "groups": [], "message": f"no group fits that has {' and '.join(map(repr, named))}"}

    async def rl_show_rollout(self, run_id: str, group_id: str) -> dict[str, Any]:
        """Show one group: its samples' texts, ratings with reasons, advantages, and what became of it."""
        return {"run_id": run_id, "group": await self._call(run_id, "rollouts", "--", group_id)}

    async def rl_trace(self, run_id: str, group_id: str) -> dict[str, Any]:
        """Show where the time of one group went, from its task to the optimizer step."""
        return {"run_id": run_id, "trace": await self._call(run_id, "trace", "--", group_id)}

    async def rl_replay(self, run_id: str, revision: str, settings: list[str] | None = None) -> dict[str, Any]:
        """Score the run's history again as a new revision, with `settings` such as "advantage.estimator=grpo".

        The live run is not touched. rl_compare(run_id, "live", revision) shows what would have changed.
        """
        self._overview(run_id)
        _check_bound("settings", len(settings or "1"), _MAX_SETTINGS)
        before, after = self._load(run_id, ()), self._load(run_id, settings or ())
        self._draft.policy.check(values_by_path(before), values_by_path(after))
        options = [f"--revision={revision}", *(f"--set={one}" for one in settings or ())]
        return {"run_id": run_id, "replay": await self._call(run_id, "replay", *options)}

    async def rl_compare(self, run_id: str, revision_a: str, revision_b: str) -> dict[str, Any]:
        """Compare two revisions of a run's history (one may be "live"): rewards, ranks, advantages, raters."""
        return {"run_id": run_id, "comparison": await self._call(run_id, "compare", "--", revision_a, revision_b)}

    async def _call(
        self, run_id: str, command: str, *arguments: str, codes: Sequence[int] = (0,), lines: bool = False
    ) -> Any:
        self._overview(run_id)
        return await self._run_command(command, f"--run={run_id}", "--json", *arguments, codes=codes, lines=lines)

    async def _run_command(self, *arguments: str, codes: Sequence[int] = (0,), lines: bool = False) -> Any:
        longest = max(map(len, arguments))
        if longest > _MAX_ARGUMENT_CHARS:
            raise ConfigError(f"an argument has {longest} characters; {_MAX_ARGUMENT_CHARS} are the most")
        async with self._commands:
            return await call_command(*arguments, codes=codes, lines=lines)

    async def _entries(self) -> list[CatalogEntry]:
        return await anyio.to_thread.run_sync(
            lambda: list_environments(self._draft.base(), self._folders, self._pythons)
        )

    def _entry(self) -> CatalogEntry:
        if self._draft.entry is None:
            raise ConfigError("no environment is selected: call rl_select_environment first")
        return self._draft.entry

    def _overview(self, run_id: str) -> RunState:
        config = self._load(run_id, ()).config
        if not config.path.is_dir():
            names = list(dict.fromkeys(one.run for one in look_at_runs()))
            close = difflib.get_close_matches(run_id, names, n=1)
            known = (
                f"did you mean {close[0]!r}?"
                if close
                else f"the newest are {', '.join(names[:_MAX_NAMED_RUNS]) or 'none'}"
            )
            raise NotFoundError(f"run {run_id!r} not found; {known}; rl_list_runs lists them")
        return look_at_folder(run_id, config.path)


class _written(AbstractContextManager[str]):  # noqa: N801 - used as a function
    """A configuration as a file that only this user can read, for as long as the context is open."""

    def __init__(self, config: RunConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lachesis-")
        self._config = config

    def __enter__(self) -> str:
        file = Path(self._folder.name) / "run.toml"
        write_private(file, to_toml(msgspec.structs.replace(self._config, folder=str(self._config.path))))
        return str(file)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def _check_bound(name: str, number: int, most: int) -> None:
    """Raise `ConfigError` where a number of a call is not from 1 to `most`."""
    if not 1 <= number <= most:
        raise ConfigError(f"{name}: {number if abs(number) <= _MAX_INTEGER else 'it'} is not from 1 to {most}")


def _models(models: Sequence[str] | None, server: str | None, own: str | None, key_env: str | None) -> list[str]:
    """Return the arguments that name the models to ask. Raises `StartupError` where a key or a model is missing."""
    named = list(models or ([] if own is None else [own]))
    folders = [model for model in named if Path(model).is_dir()]
    others = [model for model in named if model not in folders]
    arguments = [f"--folder={folder}" for folder in folders]
    if server is not None:
        arguments += [f"--server={server}", *(f"--model={model}" for model in others)]
        return arguments + ([] if key_env is None else [f"--key-env={key_env}"])
    if others or not named:
        if not os.environ.get(_OPENROUTER_KEY):
            what = f"{', '.join(others)} are no folders of models here" if others else "the configuration has no model"
            raise StartupError(
                f"{what}, and {_OPENROUTER_KEY} is not set, so OpenRouter cannot be used: set it, give models as "
                "folders, or name a server"
            )
        arguments += ["--server=openrouter", *(f"--model={model}" for model in others)]
    return arguments


def _minutes(found: RunState, begun_s: float) -> float | None:
    """Return how long a run has gone on since its last start, or, once it has ended, how long it went on in all."""
    if found.is_live:
        return (datetime.now(UTC).timestamp() - begun_s) / 60
    try:
        return from_json(SUMMARY_FILE, _RunTime, read_small_file(Path(found.folder) / SUMMARY_FILE)).wall_s / 60
    except (OSError, SchemaError):
        return None


class _RunTime(msgspec.Struct, frozen=True):
    wall_s: float


def _status(found: RunState) -> dict[str, Any]:
    successes = [one.success for one in found.rewards.values() if one.success is not None]
    begun = None if found.started_ns is None else found.started_ns / _NANOSECONDS
    running = None if begun is None else _minutes(found, begun)
    return {
        "run_id": found.run,
        "status": found.state,
        "error": found.problem,
        "environment": ", ".join(found.environments) or None,
        "running_time_minutes": running,
        "processes": {name: "running" if pid is not None else "not running" for name, pid in found.pids.items()},
        "ready": found.ready,
        "metrics": {
            "step": found.step,
            "steps": found.steps,
            "reward_mean": found.reward,
            "percent_correct": 100 * sum(successes) / len(successes) if successes else None,
            "eval_percent_correct": {row.env: 100 * row.rate for row in found.evaluations},
            "staleness_mean": found.staleness,
            "end_to_end_p99_s": found.end_to_end.p99,
            "rewards": msgspec.to_builtins(found.rewards),
        },
        "outcomes": found.outcomes or None,
        "notices": notice_lines(found.notices, time.time_ns()),
        "quarantined": found.quarantined,
        "halted": found.halted,
        "logs": _logs(found),
        "trackers": found.trackers,
        "folder": found.folder,
    }


def _logs(found: RunState) -> dict[str, str]:
    return {name: str(file) for name, file in log_files(Path(found.folder)).items()}
