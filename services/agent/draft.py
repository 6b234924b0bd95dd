"""A run that is being put together: an environment out of the catalog, and settings that were edited.

Guarantees that whatever is accepted loads as a configuration, and keeps the operator's policy.
"""

import difflib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.secrets import masked
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.json_schema import json_schema
from lachesis.pipeline.config.load import LoadedConfig, load, settings
from lachesis.pipeline.config.policy import ConfigPolicy, presets
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.config.toml import toml_value
from lachesis.pipeline.environment.source_scan import EnvironmentField
from lachesis.schemas.errors import ConfigError
from lachesis.services.agent.catalog import CatalogEntry

__all__ = ["DraftField", "RunDraft", "values_by_path"]

COMMON = (
    "model",
    "seed",
    "batching.batch_size",
    "batching.max_staleness",
    "training.steps",
    "training.learner.learning_rate",
    "training.checkpoint_every",
    "advantage.estimator",
    "curriculum.strategy",
    "evaluate.every_steps",
    "evaluate.items",
)
"""Settings that are shown if no section is requested, together with those of the environment."""
_MAX_EDITS = 512
_MAX_EDIT_BYTES = 128 << 10
_MAX_ALIKE = 4
_PLAIN: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "str": (str,)}
_LIMITS = {"minimum": "min", "exclusiveMinimum": "above", "maximum": "max", "exclusiveMaximum": "below"}


class DraftField(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A setting: `name` is its path, `known_as` another name of it. `allowed`: the operator's bounds, in words."""

    name: str
    type: str
    current_value: Any
    default: Any = None
    description: str = ""
    known_as: str | None = None
    limits: dict[str, Any] = {}
    choices: list[Any] | None = None
    allowed: str = ""
    locked: bool = False


class RunDraft:
    """Begins with the configuration `file` and the texts of `--set`, which no edit leaves behind."""

    def __init__(
        self,
        file: Path | None,
        sets: tuple[str, ...],
        policy: ConfigPolicy,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._file = file
        self._sets = sets
        self._environ = os.environ if environ is None else environ
        self.policy = policy
        self.entry: CatalogEntry | None = None
        self.edits: dict[str, Any] = {}
        self._schema = json_schema(run_config_type())
        self._known_names = {name: path for preset in presets().values() for name, path in preset.names.items()}
        """Other names of settings, under any policy and without one."""
        self._names = {**self._known_names, **policy.names}

    def base(self) -> RunConfig:
        """Return the configuration that drafts begin with. Raises `ConfigError`."""
        return load(run_config_type(), file=self._file, environ=self._environ, sets=self._sets).config

    def select(self, entry: CatalogEntry) -> None:
        """Start over with an environment. Raises `ConfigError` if it does not fit the configuration."""
        self._load(entry, {})
        self.entry, self.edits = entry, {}

    def config(self) -> RunConfig:
        """Return the configuration as it stands. Raises `ConfigError` where no environment is selected.

        The setting of a foreign class that names the model is the run's model, unless it is set.
        """
        entry = self._selected()
        config = self._load(entry, self.edits).config
        setting = None if entry.classes is None else entry.classes.model_setting
        if setting is None or config.model is None:
            return config
        env = _with_setting(config.environments[entry.section], setting, config.model)
        return msgspec.structs.replace(config, environments={entry.section: env})

    def config_to_start(self, now: datetime) -> RunConfig:
        """Return the configuration of a run to start.

        It is named after environment and time, unless a name was given.
        """
        config = self.config()
        name = config.run if "run" in self.edits else f"{self._selected().section}-{now:%Y%m%d-%H%M%S}"
        return msgspec.structs.replace(config, run=name, folder=config.folder if "folder" in self.edits else None)

    def edit(self, field: str, value: Any) -> str:
        """Set a setting, by its path or another name; None takes an earlier edit back. Return its path.

        Raises `ConfigError` with the setting, the value and what is allowed.
        """
        entry = self._selected()
        path = self._path(field, entry)
        edits = {one: kept for one, kept in self.edits.items() if one != path and not one.startswith(f"{path}.")}
        if value is not None:
            edits |= _leaves(path, value)
        _check_size(edits)
        _check_own(entry, edits)
        loaded = self._load(entry, edits)
        self.policy.check(values_by_path(self._load(entry, {})), values_by_path(loaded))
        self.edits = edits
        return path

    def fields(self, section: str = "") -> list[DraftField]:
        """Return the settings below a path; without one the common, the edited and the environment's own."""
        entry = self._selected()
        before, now = values_by_path(self._load(entry, {})), self._load(entry, self.edits)
        descriptions = {row.path: row.description for row in settings(now)}
        own = f"environments.{entry.section}."
        names = {path.replace("*", entry.section): name for name, path in self._names.items()}
        shown = [
            path
            for path in descriptions
            if (path.startswith((f"{section}.", section)) if section else self._is_common(path, own, names))
        ]
        values = values_by_path(now)
        found = [self._field(path, values.get(path), before.get(path), descriptions[path], names) for path in shown]
        return found + self._params(entry, values) if not section or own.startswith(section) else found

    def sections(self) -> list[str]:
        """Return the sections that settings lie in."""
        paths = (row.path for row in settings(self._load(self._selected(), self.edits)))
        return sorted({path.partition(".")[0] for path in paths if "." in path})

    def _is_common(self, path: str, own: str, names: Mapping[str, str]) -> bool:
        is_own = path.startswith(own) and path.removeprefix(own).count(".") == 0
        return is_own or path in COMMON or path in names or path in self.edits

    def _field(self, path: str, value: Any, before: Any, description: str, names: Mapping[str, str]) -> DraftField:
        rule, schema = self.policy.rule(path), _schema_at(self._schema, path)
        if path == "run" and path not in self.edits:
            value = before = f"{self._selected().section}-{{timestamp}}"
        return DraftField(
            name=path,
            type=_type_of(schema),
            current_value=masked(path, value),
            default=masked(path, before),
            description=description,
            known_as=names.get(path),
            limits={name: found for key, name in _LIMITS.items() if (found := _first(schema, key)) is not None},
            choices=_first(schema, "enum"),
            allowed=rule.describe(),
            locked=self.policy.locks(path, value, value) is not None,
        )

    def _params(self, entry: CatalogEntry, values: Mapping[str, Any]) -> list[DraftField]:
        given = values.get(f"environments.{entry.section}.params") or {}
        if entry.classes is not None:
            given = given.get("settings") or {}
        return [
            DraftField(
                name=f"{entry.own}{field.name}",
                type=field.type or "unknown",
                current_value=masked(field.name, given.get(field.name)),
                default=masked(field.name, field.default),
                description=field.help or "",
                locked=self._locks_param(f"{entry.own}{field.name}", field),
            )
            for field in entry.fields
            if not self._is_of_run(field.name, entry)
        ]

    def _locks_param(self, path: str, field: EnvironmentField) -> bool:
        sample = 0 if field.type in ("int", "float", "bool") else ""
        return self.policy.locks(path, sample, sample) is not None

    def _selected(self) -> CatalogEntry:
        if self.entry is None:
            raise ConfigError("no environment is selected: call rl_select_environment first")
        return self.entry

    def _path(self, field: str, entry: CatalogEntry) -> str:
        """Return the path of a setting that may be named by another name, or within the environment.

        Raises `ConfigError` that names the nearest ones where there is none.
        """
        own = f"environments.{entry.section}."
        if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", field):
            raise ConfigError(f"{field!r} names no setting: write it as batching.batch_size")
        if field in self.policy.names:
            return self.policy.names[field].replace("*", entry.section)
        head = field.partition(".")[0]
        if head in run_config_type().__struct_fields__:
            return field
        if any(head == one.name for one in entry.fields) and not self._is_of_run(field, entry):
            return f"{entry.own}{field}"
        if head in EnvironmentConfig.__struct_fields__:
            return f"{own}{field}"
        if field in self._known_names:
            return self._known_names[field].replace("*", entry.section)
        if entry.classes is not None and field in entry.classes.params:
            return f"{own}params.{field}"
        raise ConfigError(f"unknown setting {field!r}{self._alike(field, entry)}")

    def _is_of_run(self, name: str, entry: CatalogEntry) -> bool:
        """Whether a setting of a foreign class is one of the run here: `group_size`, `max_token_length` and others."""
        return entry.classes is not None and name in self._known_names

    def _alike(self, field: str, entry: CatalogEntry) -> str:
        """Return which settings may be meant by a name that is none."""
        paths = [row.path for row in settings(self._load(entry, self.edits))]
        last = field.rpartition(".")[2]
        same = [path for path in paths if path.endswith(f".{last}")][:_MAX_ALIKE]
        if same:
            return f": is {' or '.join(same)} meant?"
        names = [*self._names, *(one.name for one in entry.fields), *(path.rpartition(".")[2] for path in paths)]
        close = difflib.get_close_matches(last, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{hint or ';'} rl_get_current_config shows the common ones, with section=... more"

    def _load(self, entry: CatalogEntry, edits: Mapping[str, Any]) -> LoadedConfig[RunConfig]:
        given = self.policy.values(entry.section)
        own = f"environments.{entry.section}."
        kind = {} if entry.kind is None else {f"{own}kind": entry.kind}
        kind |= {f"{own}params.{name}": value for name, value in entry.params.items()}
        texts = [f"{path}={toml_value(value)}" for path, value in {**kind, **given, **edits}.items()]
        loaded = load(run_config_type(), file=self._file, environ=self._environ, sets=[*self._sets, *texts])
        config = msgspec.structs.replace(
            loaded.config,
            environments={entry.section: loaded.config.environments[entry.section]},
            evaluation={name: env for name, env in loaded.config.evaluation.items() if name == entry.section},
        )
        return LoadedConfig(config, loaded.origins)


def _with_setting(env: EnvironmentConfig, name: str, value: str) -> EnvironmentConfig:
    """Return a foreign class with this setting of its own, unless it is set."""
    own = {name: value, **(env.params.get("settings") or {})}
    return msgspec.structs.replace(env, params={**env.params, "settings": own})


def _check_own(entry: CatalogEntry, edits: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a setting of the environment itself is not of the plain type that its source says."""
    for field in entry.fields:
        path = f"{entry.own}{field.name}"
        kinds = _PLAIN.get(field.type or "")
        value = edits.get(path)
        if kinds is None or value is None:
            continue
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ConfigError(f"{path}: expected `{field.type}`, got {masked(path, value)!r}")


def _check_size(edits: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where there are more edits, or larger ones, than a configuration has use for."""
    try:
        size = len(msgspec.json.encode(edits))
    except (msgspec.MsgspecError, RecursionError, OverflowError, TypeError) as error:
        raise ConfigError(f"the value cannot stand in a configuration: {error}") from error
    if len(edits) > _MAX_EDITS or size > _MAX_EDIT_BYTES:
        raise ConfigError(
            f"{len(edits)} edits of {size} bytes: {_MAX_EDITS} of {_MAX_EDIT_BYTES} bytes in all are the most; take "
            "some back with null"
        )


def _leaves(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {leaf: found for key, inner in value.items() for leaf, found in _leaves(f"{path}.{key}", inner).items()}


def values_by_path(loaded: LoadedConfig[RunConfig]) -> dict[str, Any]:
    """Return the values of all settings, as a policy is held against them."""
    return {row.path: row.value for row in settings(loaded)}


def _schema_at(schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the JSON Schema of the setting at a path, empty where it has none."""
    found: Mapping[str, Any] = schema
    for part in path.split("."):
        found = _resolved(schema, found)
        inner = found.get("properties", {}).get(part, found.get("additionalProperties"))
        if not isinstance(inner, Mapping):
            return {}
        found = inner
    return found


def _resolved(schema: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a reference, or the one table in a choice, stands for."""
    for choice in [found, *found.get("anyOf", [])]:
        if "$ref" in choice:
            name = choice["$ref"].rpartition("/")[2]
            definition: Mapping[str, Any] = schema["$defs"][name]
            return definition
        if "properties" in choice or "additionalProperties" in choice:
            return choice  # type: ignore[no-any-return]
    return found


def _first(schema: Mapping[str, Any], key: str) -> Any:
    return next((one[key] for one in [schema, *schema.get("anyOf", [])] if key in one), None)


def _type_of(schema: Mapping[str, Any]) -> str:
    kinds = [one.get("type") or ("table" if "$ref" in one else "enum" if "enum" in one else "any")
             for one in schema.get("anyOf", [schema])]  # fmt: skip
    return " or ".join(dict.fromkeys(kinds))
