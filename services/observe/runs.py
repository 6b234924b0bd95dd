"""Shows the state of this machine's runs from their folders.

No server is queried, so the answer is there at once. For each folder it returns a `RunState`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.extension import load_place, wanted_trackers
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.notices import Notice
from lachesis.schemas.values import from_json
from lachesis.services.observe.notices import outcome_notices, supervisor_notices
from lachesis.services.observe.progress import newest_figures
from lachesis.services.observe.run_state import LIVE_STATES, RunState, StateName, fields_of_step
from lachesis.services.observe.summary import SUMMARY_FILE
from lachesis.services.run.known_runs import known_runs
from lachesis.services.run.notices_file import read_notices, read_outcomes
from lachesis.services.run.run_file import run_file
from lachesis.services.run.supervisor_lease import DELETION_MARK
from lachesis.services.run.supervisor_state import (
    KEEPER_FILE,
    STATE_FILE,
    Pid,
    ProcessRecord,
    SupervisorState,
    read_record,
)
from lachesis.services.run.trusted import is_trusted

__all__ = ["look_at_folder", "look_at_runs", "state_of_run"]

_PIDS_FILE = "pids.json"


class _AnySummary(msgspec.Struct):
    """What the summaries of `up` and of the demo have in common."""

    state: str = "unknown"
    reason: str | None = None
    outcomes: dict[str, int] = {}


def look_at_runs() -> list[RunState]:
    """Return the runs that this user started on this machine, and those in `runs/` here, newest first."""
    folders = {Path(record.folder): record.run for record in known_runs()}
    for folder in sorted(Path("runs").glob("*")):
        is_named = folder.name.isprintable()  # others have names that JSON cannot hold
        if is_named and run_file(folder) is not None and is_trusted(folder.absolute()):
            folders.setdefault(folder.absolute(), folder.name)
    found = [look_at_folder(name, folder) for folder, name in folders.items()]
    return sorted(found, key=lambda one: (-(one.started_ns or 0), one.run, one.folder))


def look_at_folder(run: str, folder: Path) -> RunState:
    """Return how the run called `run` stands, whose folder is `folder`."""
    state = read_record(folder / STATE_FILE, SupervisorState)
    keeper = read_record(folder / KEEPER_FILE, ProcessRecord)
    ended = _summary(folder)
    found = state_of_run(
        deleting=(folder / DELETION_MARK).exists(),
        state=state,
        supervisor_runs=state.process.runs if state is not None else False,
        keeper_runs=bool(keeper is not None and keeper.runs),
        ended=ended.state,
    )
    problem = _problem(found, run, state, ended.reason)
    overview = RunState(
        run=run,
        folder=str(folder),
        state=found,
        problems=[] if problem is None else [problem],
        supervisor=state.process.pid if state is not None and state.process.runs else None,
        ready=None if state is None else state.ready,
        processes=None if state is None else state.processes,
        started_ns=None if state is None else state.process.begun_ns,
        pids=_pids(folder),
        logs=str(folder / "logs") if (folder / "logs").is_dir() else None,
        notices=_notices(folder, found, ended.outcomes),
        outcomes=read_outcomes(folder) if found in LIVE_STATES else ended.outcomes,
        **fields_of_step(newest_figures(folder)),
    )
    file = run_file(folder)
    if file is None:
        return overview
    overview = msgspec.structs.replace(overview, config=str(file))
    try:
        config = load(run_config_type(), file=file).config
    except (ConfigError, StartupError) as error:
        unreadable = f"its configuration is unreadable: {error}"
        return msgspec.structs.replace(overview, problems=overview.problems or [unreadable])
    return msgspec.structs.replace(
        overview,
        run=config.run,
        mode=config.mode,
        environments=list(config.environments),
        steps=config.training.steps,
        trackers=_trackers(config),
    )


def state_of_run(
    *, deleting: bool, state: SupervisorState | None, supervisor_runs: bool | None, keeper_runs: bool, ended: str
) -> StateName:
    """Return the state of a run. Pure.

    `supervisor_runs` None: the supervisor was started on another machine. `ended`: the state in the run's summary.
    """
    if deleting:
        return "half deleted"
    if state is not None and supervisor_runs:
        return "stopping" if state.phase == "ended" else state.phase
    if keeper_runs:
        return "starting" if state is None else "stopping" if state.phase == "ended" else "restarting"
    if state is not None and supervisor_runs is None:
        return "elsewhere"
    if state is not None and state.phase != "ended":
        return "interrupted"
    known: Mapping[str, StateName] = {
        "finished": "finished", "stopped": "stopped", "failed": "failed", "interrupted": "stopped",
    }  # fmt: skip
    return known.get(ended, "unknown")


def _problem(found: StateName, run: str, state: SupervisorState | None, reason: str | None) -> str | None:
    if found == "failed":
        return reason
    if found == "interrupted":
        return f"its supervisor was killed, or the machine restarted: `lachesis runs start {run}` goes on"
    if found == "half deleted":
        return f"its deletion was begun: `lachesis runs delete {run}` ends it"
    if found == "elsewhere" and state is not None:
        return f"started on {state.process.host} (pid {state.process.pid}), of which nothing is known here"
    return None


def _notices(folder: Path, found: StateName, outcomes: Mapping[str, int]) -> list[Notice]:
    if found not in LIVE_STATES:
        return outcome_notices(outcomes)
    said = read_notices(folder)
    return supervisor_notices(folder) if said is None else said


def _summary(folder: Path) -> _AnySummary:
    try:
        return from_json(SUMMARY_FILE, _AnySummary, read_small_file(folder / SUMMARY_FILE))
    except (OSError, SchemaError):
        return _AnySummary()


def _pids(folder: Path) -> dict[str, int | None]:
    """Return the processes of a run by name, those that do not run with None."""
    try:
        pids = from_json(_PIDS_FILE, dict[str, Pid | None], read_small_file(folder / _PIDS_FILE))
    except (OSError, SchemaError):
        return {}
    return {name: pid if pid is not None and _exists(pid) else None for name, pid in pids.items()}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _trackers(config: RunConfig) -> dict[str, str]:
    """Return where each tracker of the run has its figures, by the tracker's name."""
    return {
        setting.rpartition(".")[2]: str(load_place(spec.place)(config))
        for setting, spec in wanted_trackers(config).items()
    }
