"""The environments that an agent can select: configured, built-in, installed, and found in source.

Nothing is imported to find them.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.installed import scan_installed
from lachesis.pipeline.environment.load import environment_kinds
from lachesis.pipeline.environment.source_files import scan_files
from lachesis.pipeline.environment.source_scan import EnvironmentField, FoundEnvironment
from lachesis.pipeline.extension import ForeignClasses, foreign_classes
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import check_name

__all__ = ["CatalogEntry", "list_environments", "select_environment"]

_NEEDS_PYTHON = (
    "it needs an interpreter that has {package}, and none is named: the operator gives one by `lachesis mcp "
    '--{kind}-python`, or rl_edit_config("python", "{kind}/bin/python") does'
)
_VERIFIERS = "an environment of verifiers cannot be run by its source alone: wrap it as a lachesis.Environment"
_MAX_SECTION_CHARS = 64
"""As `check_name`."""


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that can be selected. `kind`: what a configuration names it by; None: as `name` has it there.

    `section`: its name under [environments]. `params`: what else [environments.NAME.params] has. `fields`: its own
    settings, `environments.NAME.params`, or `params.settings` of a class of another project. `problem`: why it cannot
    be selected, and what to do instead. `note`: what is to be set before a run.
    """

    name: str
    section: str
    kind: str | None
    params: dict[str, Any] = {}
    family: str | None = None
    file_path: str | None = None
    description: str | None = None
    fields: list[EnvironmentField] = []
    problem: str | None = None
    note: str | None = None

    @property
    def classes(self) -> ForeignClasses | None:
        """The classes of another project that it is one of."""
        return None if self.kind is None else foreign_classes().get(self.kind)

    @property
    def own(self) -> str:
        """Where its own settings lie: the path with a dot at the end."""
        below = "params" if self.classes is None else "params.settings"
        return f"environments.{self.section}.{below}."


def list_environments(
    config: RunConfig, folders: Sequence[Path], pythons: Mapping[str, str] | None = None
) -> list[CatalogEntry]:
    """Return the environments that can be selected.

    Those of the configuration, of files in `folders`, of installed packages, and the built-in ones. `pythons`: by kind
    an interpreter for classes of another project; by default the one that the configuration names for another of them.
    """
    interpreters = {**_configured_pythons(config), **(pythons or {})}
    found = [
        CatalogEntry(name=name, section=name, kind=None, description=f"in the configuration: {env.kind}")
        for name, env in config.environments.items()
    ]
    for folder in folders:
        for file in scan_files(folder):
            path = str(Path(file.path).absolute())
            found += [_entry(env, env.name, f"{path}:{env.name}", path, interpreters) for env in file.environments]
    found += [
        _entry(one.environment, one.entry_point or one.environment.name, one.kind, one.path, interpreters)
        for one in scan_installed().environments
    ]
    found += [
        CatalogEntry(name=name, section=_section(name), kind=name, family="lachesis", description="built in")
        for name in sorted(environment_kinds())
    ]
    return _unique(found)


def _configured_pythons(config: RunConfig) -> dict[str, str]:
    """Return by kind the first interpreter that the configuration names."""
    named = [(env.kind, env.params.get("python")) for env in config.environments.values()]
    return {kind: python for kind, python in reversed(named) if isinstance(python, str)}


def _entry(env: FoundEnvironment, name: str, place: str, path: str, pythons: Mapping[str, str]) -> CatalogEntry:
    kind, params, note = place, dict[str, Any](), None
    if (classes := foreign_classes().get(env.family)) is not None:
        kind, params = env.family, {"place": place}
        if kind in pythons:
            params["python"] = pythons[kind]
        elif importlib.util.find_spec(classes.package) is None:
            note = _NEEDS_PYTHON.format(package=classes.package, kind=kind)
    return CatalogEntry(
        name=name,
        section=_section(name),
        kind=kind,
        params=params,
        family=env.family,
        file_path=path,
        description=env.summary,
        fields=env.fields,
        problem=_VERIFIERS if env.family == "verifiers" else None,
        note=note,
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
