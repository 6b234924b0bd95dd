"""Finds a run by its name from any folder: `lachesis up` records where each run of this user lies.

One small file a run folder, in `$XDG_STATE_HOME/lachesis/runs` (default ~/.local/state). The record helps to find a
folder and nothing else: a run works without it, and a record whose folder is gone counts for nothing.
"""

import hashlib
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file, read_small_text
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.values import from_json
from lachesis.services.run.run_file import is_written_here, run_file
from lachesis.services.run.trusted import check_trusted

__all__ = ["KnownRun", "find_run", "forget_run", "has_stored", "known_runs", "register_run", "run_in", "state_folder"]

log = logging.getLogger("lachesis")


class KnownRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was started on this machine: its folder, and the configuration file it was started with. `stored`:
    its history has been in that folder."""

    run: str
    folder: str
    config: str | None = None
    stored: bool = False


def register_run(config: RunConfig, file: Path | None, *, stored: bool = False) -> None:
    """Record where a run lies. `file`: its configuration; the one that it wrote itself says nothing new.

    `stored`: from now on its history is in its folder. Where that cannot be written, `--run` finds it in its own
    folder's parent alone.
    """
    path = _record(config.path)
    if path is None:
        return
    given = None if file is None else str(file.absolute())
    if file is not None and file.absolute().parent == config.path and is_written_here(file):
        given = _configuration_in(path) or given
    record = KnownRun(run=config.run, folder=str(config.path), config=given, stored=stored or has_stored(config.path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(record))
    except OSError as error:
        log.info("this run is not found by its name from other folders: %s", error)


def has_stored(folder: Path) -> bool:
    """Return whether a run is recorded whose history has been in `folder`, whether or not that is there."""
    path = _record(folder)
    try:
        return path is not None and from_json(path.name, KnownRun, read_small_file(path)).stored
    except (OSError, SchemaError):
        return False


def forget_run(folder: Path) -> None:
    """Remove the record of a run's folder, if there is one."""
    path = _record(folder)
    if path is not None:
        path.unlink(missing_ok=True)


def known_runs() -> list[KnownRun]:
    """Return the recorded runs whose folders are there, sorted by name."""
    found = [record for record in _records() if Path(record.folder).is_dir()]
    return sorted(found, key=lambda record: (record.run, record.folder))


def _records() -> Iterator[KnownRun]:
    state = state_folder(os.environ)
    for path in state.glob("*.json") if state is not None else ():
        with suppress(OSError, SchemaError):  # removed meanwhile, or damaged: the run is only not found by its name
            yield from_json(path.name, KnownRun, read_small_file(path))


def find_run(name: str, file: Path | None = None) -> Path | None:
    """Return the folder of the run called `name`: runs/NAME here, the recorded or a renamed one.

    None if there is none. A renamed folder is known by its own configuration.

    If the configuration `file` is given, only a run that was started with that file is returned. Raises `ConfigError`
    where several runs of that name are recorded, and where others may have written what is in its folder.
    """
    here = Path("runs") / name
    if here.is_dir():
        check_trusted(here.absolute())
        return here.absolute()
    found = [record for record in known_runs() if record.run == name]
    if file is not None:
        found = [record for record in found if record.config == str(file.absolute())]
    if len(found) > 1:
        raise ConfigError(
            f"there are {len(found)} runs called {name!r}: {', '.join(record.folder for record in found)}; say which "
            "one by its own configuration, --config FOLDER/run.toml"
        )
    folder = Path(found[0].folder) if found else None if file is not None else _renamed(name)
    if folder is not None:
        check_trusted(folder)
    return folder


def run_in(folder: Path) -> str | None:
    """Return the name of the run whose configuration was written into a folder, None if there is none."""
    file = run_file(folder)
    if file is None or not is_written_here(file):
        return None
    try:
        name = tomllib.loads(read_small_text(file)).get("run")
    except (OSError, ValueError, RecursionError):
        return None
    return name if isinstance(name, str) else None


def _renamed(name: str) -> Path | None:
    """Return the folder beside where a run lay, or in runs/ here, that holds it under another name.

    Raises `ConfigError` where there are several, copies of one run.
    """
    places = dict.fromkeys(
        [Path("runs").absolute(), *(Path(one.folder).parent for one in _records() if one.run == name)]
    )
    found: dict[Path, None] = {}
    for place in places:
        with suppress(OSError):
            found |= dict.fromkeys(folder for folder in sorted(place.iterdir()) if run_in(folder) == name)
    if len(found) > 1:
        raise ConfigError(
            f"the run {name!r} lies in {len(found)} folders, none of which has its name: {', '.join(map(str, found))}; "
            "say which one by its own configuration, --config FOLDER/run.toml"
        )
    return next(iter(found), None)


def _configuration_in(record: Path) -> str | None:
    """Return the configuration file that is recorded already, None if there is none."""
    try:
        return from_json(record.name, KnownRun, read_small_file(record)).config
    except (OSError, SchemaError):
        return None


def _record(folder: Path) -> Path | None:
    state = state_folder(os.environ)
    digest = hashlib.sha256(str(folder.absolute()).encode(errors="surrogateescape")).hexdigest()[:32]
    return None if state is None else state / f"{digest}.json"


def state_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the records of this user's runs, None without a home."""
    home = environ.get("XDG_STATE_HOME") or (environ.get("HOME") and f"{environ['HOME']}/.local/state")
    return Path(home) / "lachesis" / "runs" if home else None
