"""Finds the environments of installed packages by files and entry points, without importing any.

It searches packages that need lachesis-rl, verifiers or a project whose classes an extension runs, and the modules that
entry points of the group `lachesis.environments` name (`name = "module:Class"`), editable installs among them.
Guarantees that a package that cannot be read is named and hides no other.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, distributions
from itertools import islice
from pathlib import Path

from msgspec import Struct

from lachesis.pipeline.common.safe_text import encodable
from lachesis.pipeline.common.secret_texts import error_text
from lachesis.pipeline.environment.source_files import SourceFile, scan_files
from lachesis.pipeline.environment.source_scan import FoundEnvironment
from lachesis.pipeline.extension import foreign_classes
from lachesis.schemas.errors import ConfigError

__all__ = ["ENTRY_POINTS", "InstalledEnvironment", "InstalledEnvironments", "scan_installed"]

ENTRY_POINTS = "lachesis.environments"
_MAX_PACKAGES = 1000
"""Packages that are looked into."""
_MAX_FILES = 2000
"""Python files of a package that are read."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class InstalledEnvironment(Struct, frozen=True, kw_only=True):
    """An environment of an installed package."""

    package: str
    """Name of the distribution."""
    kind: str
    """`module:Class`, with which a configuration names a Lachesis environment."""
    path: str
    """File of its source."""
    environment: FoundEnvironment
    entry_point: str | None = None
    """Name of the entry point that names it. None: it was found by the package's files."""


class InstalledEnvironments(Struct, frozen=True, kw_only=True):
    """The environments of installed packages; `problems`: what could not be read, and why."""

    environments: list[InstalledEnvironment] = []
    problems: list[str] = []


def scan_installed(path: list[str] | None = None) -> InstalledEnvironments:
    """Return the environments of the packages installed on `path`, `sys.path` by default."""
    where = sys.path if path is None else path
    found: dict[str, InstalledEnvironment] = {}
    problems: list[str] = []
    for package in islice(distributions(path=where), _MAX_PACKAGES):
        try:
            named = {point.value: point.name for point in package.entry_points if point.group == ENTRY_POINTS}
            name = encodable(str(package.name))
            modules = list(_modules(package, name, named, where, problems))
        except Exception as error:  # noqa: BLE001 - damaged metadata of other people's packages raises anything
            problems.append(f"{_place_of(package)}: its metadata cannot be read: {error_text(error)}; install it again")
            continue
        for module, file in modules:
            for source in _scan(file, name, problems):
                for environment in source.environments:
                    kind = f"{module}:{environment.name}"
                    one = InstalledEnvironment(
                        package=name, kind=kind, path=source.path, environment=environment, entry_point=named.get(kind)
                    )
                    found.setdefault(kind, one)
        problems += [
            f"{name}: its entry point {point} names {value}, which is no environment in its source"
            for value, point in named.items()
            if value not in found
        ]
    # a package can come twice: the backport importlib_metadata, once imported, finds each again
    environments = sorted(found.values(), key=lambda one: one.kind)
    return InstalledEnvironments(environments=environments, problems=list(dict.fromkeys(problems)))


def _place_of(package: Distribution) -> str:
    """Return the folder of a package's metadata; its name may be what cannot be read."""
    return encodable(str(getattr(package, "_path", "a package")))


def _modules(
    package: Distribution, name: str, named: Iterable[str], where: list[str], problems: list[str]
) -> Iterator[tuple[str, Path]]:
    """Yield the modules of a package that may hold environments, each with its file."""
    if _needs_framework(package):
        files = [file for file in package.files or () if file.suffix == ".py" and ".." not in file.parts]
        if len(files) > _MAX_FILES:
            problems.append(f"{name}: of its {len(files)} Python files the first {_MAX_FILES} were read")
        for file in files[:_MAX_FILES]:
            parts = file.parent.parts if file.stem == "__init__" else (*file.parent.parts, file.stem)
            yield ".".join(parts), Path(str(package.locate_file(file)))
    for module in dict.fromkeys(value.partition(":")[0] for value in named):
        if (source := _file_of(module, where)) is not None:
            yield module, source


def _needs_framework(package: Distribution) -> bool:
    names = (_NAME.match(requirement) for requirement in package.requires or ())
    needed = {re.sub(r"[-_.]+", "-", name.group()).lower() for name in names if name}
    frameworks = {"lachesis-rl", "verifiers", *(one.package for one in foreign_classes().values())}
    return not frameworks.isdisjoint(needed)


def _file_of(module: str, where: list[str]) -> Path | None:
    """Return the source of a module without importing its packages; None if there is none on `where`."""
    places: list[str] | None = where
    origin: str | None = None
    for part in module.split("."):
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        origin, places = spec.origin, list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _scan(file: Path, package: str, problems: list[str]) -> list[SourceFile]:
    try:
        sources = scan_files(file)
    except ConfigError as error:
        problems.append(f"{package}: {error}")
        return []
    problems += [f"{package}: {source.path} {source.problem}" for source in sources if source.problem]
    return sources
