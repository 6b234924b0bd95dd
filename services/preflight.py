"""What a run's configuration names and this machine should have: models, environments, raters. Looked for before
anything starts.

Nothing of the user's is run and nothing heavy imported: a module is found as an import would find it, and its source
read for the name.
"""

import ast
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments import load as environments
from lachesis.pipeline.environments.binding import nearest
from lachesis.pipeline.scoring import raters
from lachesis.schemas.errors import ConfigError
from lachesis.services.live.progress import newest_checkpoint

__all__ = ["check_named"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def check_named(config: RunConfig) -> None:
    """Raise `ConfigError` with everything that the configuration names and that is not there."""
    problems = [*_models(config), *_environments(config), *_raters(config)]
    if problems:
        raise ConfigError("; ".join(problems))


def _models(config: RunConfig) -> Iterator[str]:
    """A folder must hold a model; what may be an id of the Hugging Face hub is left to whoever loads it."""
    if config.model is None and config.mode == "train" and newest_checkpoint(config.path) is None:
        yield "model: not set; name a local folder or a Hugging Face id"
    started = {role: settings for role, settings in config.inference.items() if settings.url is None}
    named = {"model": config.model} | {f"inference.{role}.model": settings.model for role, settings in started.items()}
    for setting, name in named.items():
        if name is None:
            continue
        if Path(name).is_dir():
            if not (Path(name) / "config.json").is_file():
                yield f"{setting}: the folder {name!r} holds no model: it has no config.json"
        elif Path(name).exists() or not _HUB_ID.fullmatch(name):
            yield f"{setting}: there is no folder {name!r}"


def _environments(config: RunConfig) -> Iterator[str]:
    for table, named in (("environments", config.environments), ("evaluation", config.evaluation)):
        for name, env in named.items():
            if not env.is_foreign:
                problem = _problem(environments.BUILTIN.get(env.kind, env.kind), environments.BUILTIN)
                if problem is not None:
                    yield f"{table}.{name}.kind: {problem}"


def _raters(config: RunConfig) -> Iterator[str]:
    scoring = {"scoring": config.scoring}
    scoring |= {f"environments.{name}.scoring": env.scoring for name, env in config.environments.items() if env.scoring}
    for table, settings in scoring.items():
        for number, rater in enumerate(settings.raters):
            problem = _problem(raters.BUILTIN.get(rater.rater, rater.rater), raters.BUILTIN)
            if problem is not None:
                yield f"{table}.raters[{number}].rater: {problem}"


def _problem(reference: str, builtin: dict[str, str]) -> str | None:
    """Return what is wrong with `module:name` or `path/to/file.py:name`, None where nothing is seen to be."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        return f"{reference!r} is no built-in one{nearest(reference, builtin)}; your own is module:name"
    source: Path | None
    if place.endswith(".py"):
        source = Path(place)
        if not source.is_file():
            return f"there is no file {place!r} in {Path.cwd()}"
    else:
        spec = _find_module(place)
        if spec is None:
            return f"there is no module {place!r}: install it, or put its folder on PYTHONPATH"
        source = Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None
    names = None if source is None else _names(source)
    if names is None or name in names:
        return None
    return f"{place} has no {name!r}{nearest(name, names)}"


def _find_module(name: str) -> ModuleSpec | None:
    """Return where a module lies. Unlike `importlib.util.find_spec` this imports no package on the way."""
    path, spec = None, None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        whole = ".".join(parts[:end])
        found = (finder.find_spec(whole, path) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec


def _names(source: Path) -> set[str] | None:
    """Return every name that a module's own lines may bind, None where that cannot be told from them."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # whoever imports it will say more
    found: set[str] = set()
    for node in tree.body if all(isinstance(node, _PLAIN) for node in tree.body) else ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                found.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
    return None if found & {"*", "__getattr__"} else found


_PLAIN = (
    ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr
)  # fmt: skip
"""Statements that bind names only by what they are; with others (if, try, with), names anywhere in the module count."""
