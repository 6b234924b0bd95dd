"""The environments that an agent can select: configured, built-in, installed, and found in source.

Nothing is imported to find them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments.installed import scan_installed
from lachesis.pipeline.environments.load import BUILTIN
from lachesis.pipeline.environments.source_files import scan_files
from lachesis.pipeline.environments.source_scan import EnvironmentField, Family, FoundEnvironment
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import check_name

__all__ = ["CatalogEntry", "list_environments", "select_environment"]

_MAX_SECTION_CHARS = 64
"""As `check_name`."""


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that can be selected. `kind`: what a configuration names it by; None: as `name` has it there.

    `section`: its name under [environments]. `fields`: its own settings, `environments.NAME.params`. `problem`: why it
    cannot be selected, and what to do instead.
    """

    name: str
    section: str
    kind: str | None
    family: Family | None = None
    file_path: str | None = None
    description: str | None = None
    fields: list[EnvironmentField] = []
    problem: str | None = None


def list_environments(config: RunConfig, folders: Sequence[Path]) -> list[CatalogEntry]:
    """Return the environments that can be selected.

    Those of the configuration, of files in `folders`, of installed packages, and the built-in ones.
    """
    found = [
        CatalogEntry(name=name, section=name, kind=None, description=f"in the configuration: {env.kind}")
        for name, env in config.environments.items()
    ]
    for folder in folders:
        for file in scan_files(folder):
            path = str(Path(file.path).absolute())
            found += [_entry(env, env.name, f"{path}:{env.name}", path) for env in file.environments]
    found += [
        _entry(one.environment, one.entry_point or one.environment.name, one.kind, one.path)
        for one in scan_installed().environments
    ]
    found += [
        CatalogEntry(name=name, section=_section(name), kind=name, family="lachesis", description="built in")
        for name in sorted(BUILTIN)
    ]
    return _unique(found)


def _entry(env: FoundEnvironment, name: str, kind: str, path: str) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        section=_section(name),
        kind=kind,
        family=env.family,
        file_path=path,
        description=env.summary,
        fields=env.fields,
        problem=None if env.family == "lachesis" else _foreign(env.family),
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


def _foreign(family: str) -> str:
    if family == "atropos":
        return (
            "an environment of Atropos needs an interpreter that has atroposlib: add [environments.NAME] with kind = "
            '"atropos" and params.place = "FILE:CLASS" to the configuration, and select that'
        )
    return "an environment of verifiers cannot be run by its source alone: wrap it as a lachesis.Environment"
