"""Checks before a start that a configuration's models, environments, raters and curriculum exist.

None of the user's code runs here and nothing heavy is imported: a module is found as an import would find it, and its
source is read for the name. `load_check` then loads what was found.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.user_code import missing_file
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.known_strategies import strategy_names
from lachesis.pipeline.environment import load as environments
from lachesis.pipeline.extension import TrainerSpec, load_place
from lachesis.pipeline.model.source import find_model
from lachesis.pipeline.normalizer.known_estimators import estimator_names
from lachesis.pipeline.scorer import raters
from lachesis.schemas.errors import ConfigError
from lachesis.services.planned_processes import planned_processes
from lachesis.services.run.checkpoints import newest_checkpoint

__all__ = ["NamedModel", "Problem", "check_named", "named_models", "named_problems"]


class Problem(NamedTuple):
    """What is wrong with a setting, and how to fix it."""

    setting: str
    text: str
    mend: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.text}"


class NamedModel(NamedTuple):
    """A model that a setting names. `weights`: whether they are loaded here, and not by vLLM alone. `own_tokenizer` and
    `own_template`: what is taken in place of the tokenizer beside the weights, and of its chat template.
    """

    name: str
    weights: bool
    own_tokenizer: str | None
    own_template: str | None = None


def check_named(config: RunConfig) -> None:
    """Raise `ConfigError` with everything that the configuration names and that is not there."""
    problems = named_problems(config)
    if problems:
        raise ConfigError("; ".join(map(str, problems)))


def named_problems(config: RunConfig) -> list[Problem]:
    """Return everything that the configuration names and that is not there."""
    return [
        *_models(config),
        *_templates(config),
        *_environments(config),
        *_raters(config),
        *_estimators(config),
        *_curriculum(config),
    ]


def _models(config: RunConfig) -> Iterator[Problem]:
    mend = "set it to a folder written by save_pretrained, or to the id of a causal language model on the hub"
    if config.model is None and config.mode == "train" and newest_checkpoint(config.path) is None:
        yield Problem("model", "not set; name a local folder or a Hugging Face id", mend)
    if config.mode == "train" and (elsewhere := config.trains_elsewhere("trainer", "")) is not None:
        yield from _tokenizer(config, elsewhere)
        return
    for setting, one in named_models(config).items():
        try:
            find_model(
                one.name,
                weights=one.weights,
                tokenizer=not one.own_tokenizer,
                template=one.own_template is None,
                exceptions=config.model_exceptions,
            )
        except ConfigError as error:
            yield Problem(setting, str(error), mend)


def named_models(config: RunConfig) -> dict[str, NamedModel]:
    """Return the models that trainer and servers take, by the setting that names them."""
    started = {row.part: config.role(row.part) for row in planned_processes(config) if row.service == "inference"}
    started |= {role: settings for role, settings in config.inference.items() if settings.url is None}
    loads = config.mode == "train" or any(one.model is None and one.spec.loads_here for one in started.values())
    found: dict[str, NamedModel] = {}
    if config.model is not None and (loads or any(one.model is None for one in started.values())):
        found["model"] = NamedModel(config.model, loads, config.tokenizer, config.chat_template)
    for role, one in started.items():
        if one.model is not None:
            own = one.tokenizer, one.chat_template
            found[f"inference.{role}.model"] = NamedModel(one.model, one.spec.loads_here, *own)
    return found


def _templates(config: RunConfig) -> Iterator[Problem]:
    named = {"chat_template": config.chat_template}
    named |= {f"inference.{role}.chat_template": one.chat_template for role, one in config.inference.items()}
    for setting, template in named.items():
        if template is None or find_spec("jinja2") is None:  # without it there is nothing that renders here
            continue
        from lachesis.pipeline.model.chat_template import read_template

        try:
            read_template(template)
        except ConfigError as error:
            yield Problem(setting, str(error), "name a file with a chat template in Jinja's syntax, or give its text")


def _tokenizer(config: RunConfig, elsewhere: TrainerSpec) -> Iterator[Problem]:
    """Yield what is wrong with the tokenizer, all that is here of a model that is trained elsewhere."""
    setting, there = load_place(elsewhere.model)(config)
    if config.model is None and there is None:
        yield Problem(setting, "not set", "name a model that is known there, or set `model` to its name")
        return
    name = config.tokenizer or config.model or there
    try:
        find_model(str(name), weights=False, template=config.chat_template is None)
    except ConfigError as error:
        yield Problem("tokenizer", str(error), "set it to a folder with the model's tokenizer, or to its id on the hub")


def _environments(config: RunConfig) -> Iterator[Problem]:
    for table, named in (("environments", config.environments), ("evaluation", config.evaluation)):
        for name, env in named.items():
            if not env.is_foreign:
                yield from _reference(f"{table}.{name}.kind", env.kind, environments.environment_kinds())


def _raters(config: RunConfig) -> Iterator[Problem]:
    scoring = {"scoring": config.scoring}
    for table, named in (("environments", config.environments), ("evaluation", config.evaluation)):
        scoring |= {f"{table}.{name}.scoring": env.scoring for name, env in named.items() if env.scoring}
    for table, settings in scoring.items():
        for number, rater in enumerate(settings.raters):
            yield from _reference(f"{table}.raters[{number}].rater", rater.rater, raters.rater_places())


def _estimators(config: RunConfig) -> Iterator[Problem]:
    yield from _reference("advantage.estimator", config.advantage.estimator, estimator_names())
    for name, settings in config.environments.items():
        if settings.advantage is not None:
            path = f"environments.{name}.advantage.estimator"
            yield from _reference(path, settings.advantage.estimator, estimator_names())


def _curriculum(config: RunConfig) -> Iterator[Problem]:
    yield from _reference("curriculum.strategy", config.curriculum.strategy, strategy_names())


def _reference(setting: str, reference: str, builtin: Collection[str]) -> Iterator[Problem]:
    """Yield what is wrong with a setting that names a built-in thing, or `module:name`."""
    if reference in builtin:
        return
    text = _problem(reference, builtin)
    if text is not None:
        yield Problem(setting, text, f"correct {setting}: a built-in name, module:name or path/to/file.py:name")


def _problem(reference: str, builtin: Collection[str]) -> str | None:
    """Return what is wrong with `module:name` or `path/to/file.py:name`, None where nothing is seen to be."""
    place, colon, name = reference.rpartition(":")
    if not colon:
        return f"{reference!r} is no built-in one{nearest(reference, builtin)}"
    source: Path | None
    if place.endswith(".py"):
        source = Path(place)
        if not source.is_file():
            return missing_file(source)
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
    """Return every name that a module's own lines may bind, None if they do not show that."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # its import will say more
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
