"""The environments that an agent can select: configured, built-in, installed, and found in source.

Nothing is imported to find them.
"""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.installed import scan_installed
from lachesis.pipeline.environment.load import environment_kinds
from lachesis.pipeline.environment.source_files import scan_files
from lachesis.pipeline.environment.source_scan import EnvironmentField, Family, FoundEnvironment
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import check_name

__all__ = ["ATROPOS_KIND", "CatalogEntry", "list_environments", "select_environment"]

ATROPOS_KIND = "atropos"
_NEEDS_PYTHON = (
    "it needs an interpreter that has atroposlib, and none is named: the operator gives one by `lachesis mcp "
    '--atropos-python`, or rl_edit_config("python", "atropos/bin/python") does'
)
_VERIFIERS = "an environment of verifiers cannot be run by its source alone: wrap it as a lachesis.Environment"
_MAX_SECTION_CHARS = 64
"""As `check_name`."""


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that can be selected. `kind`: what a configuration names it by; None: as `name` has it there.

    `section`: its name under [environments]. `params`: what else [environments.NAME.params] has. `fields`: its own
    settings, `environments.NAME.params`, or `params.settings` of a class of Atropos. `problem`: why it cannot be
    selected, and what to do instead. `note`: what is to be set before a run.
    """

    name: str
    section: str
    kind: str | None
    params: dict[str, Any] = {}
    family: Family | None = None
    file_path: str | None = None
    description: str | None = None
    fields: list[EnvironmentField] = []
    problem: str | None = None
    note: str | None = None

    @property
    def own(self) -> str:
        """Where its own settings lie: the path with a dot at the end."""
        below = "params.settings" if self.kind == ATROPOS_KIND else "params"
        return f"environments.{self.section}.{below}."


def list_environments(
    config: RunConfig, folders: Sequence[Path], atropos_python: str | None = None
) -> list[CatalogEntry]:
    """Return the environments that can be selected.

    Those of the configuration, of files in `folders`, of installed packages, and the built-in ones. `atropos_python`:
    an interpreter with atroposlib; by default the one that the configuration names for another class of Atropos.
    """
    python = atropos_python or _atropos_python(config)
    found = [
        CatalogEntry(name=name, section=name, kind=None, description=f"in the configuration: {env.kind}")
        for name, env in config.environments.items()
    ]
    for folder in folders:
        for file in scan_files(folder):
            path = str(Path(file.path).absolute())
            found += [_entry(env, env.name, f"{path}:{env.name}", path, python) for env in file.environments]
    found += [
        _entry(one.environment, one.entry_point or one.environment.name, one.kind, one.path, python)
        for one in scan_installed().environments
    ]
    found += [
        CatalogEntry(name=name, section=_section(name), kind=name, family="lachesis", description="built in")
        for name in sorted(environment_kinds())
    ]
    return _unique(found)


def _atropos_python(config: RunConfig) -> str | None:
    """Return the interpreter that the configuration names for another class of Atropos; None: it names none."""
    named = (env.params.get("python") for env in config.environments.values() if env.kind == ATROPOS_KIND)
    return next((python for python in named if isinstance(python, str)), None)


def _entry(env: FoundEnvironment, name: str, kind: str, path: str, python: str | None) -> CatalogEntry:
    is_atropos = env.family == "atropos"
    needs_python = is_atropos and python is None and importlib.util.find_spec("atroposlib") is None
    return CatalogEntry(
        name=name,
        section=_section(name),
        kind=ATROPOS_KIND if is_atropos else kind,
        params={"place": kind, **({} if python is None else {"python": python})} if is_atropos else {},
        family=env.family,
        file_path=path,
        description=env.summary,
        fields=env.fields,
        problem=_VERIFIERS if env.family == "verifiers" else None,
        note=_NEEDS_PYTHON if needs_python else None,
    )


def select_environment(name: str, entries: Sequence[CatalogEntry]) -> CatalogEntry:
    """Return the environment of that name. Raises `ConfigError` where there is none that can be selected."""
    found = next((entry for entry in entries if entry.name == name), None)
    if found is None:
        raise ConfigError(f"no environment {name!r}; there are {', '.join(entry.name for entry in entries)}")
    if found.problem is not None:
        raise ConfigError(f"{name}: {found.problem}")
    return found


def _unique(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """Return the entries, those of a name that is taken named by file and class."""
    taken: dict[str, CatalogEntry] = {}
    for entry in entries:
        name = entry.name if entry.name not in taken or entry.kind is None else entry.kind
        taken.setdefault(name, msgspec.structs.replace(entry, name=name))
    return list(taken.values())


def _section(name: str) -> str:
    """Return a name that can stand in subjects."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    section = re.sub(r"[^a-z0-9_-]+", "-", words)[:_MAX_SECTION_CHARS].strip("-_") or "env"
    check_name("environment", section)
    return section
