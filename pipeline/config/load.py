"""Loads a configuration: defaults, the recipe, the TOML file, variables, then `--set a.b=c`.

Variables are those that the struct names itself (`VARIABLES`), and after them `LACHESIS_*`. The recipe is named by one
of the sources that go before it; a struct without a field `recipe` has none.

Fills a msgspec struct type from those sources, and returns for each value the place it came from. Guarantees that no
unknown key passes silently: an error names the key, its source (of the file, the line too) and the nearest known key.
Every path becomes absolute: those of the file are relative to the file's folder, all others to the current one.
"""

import ast
import copy
import functools
import inspect
import itertools
import math
import re
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.foreign_variables import without_service_variables
from lachesis.pipeline.common.paths import resolve_paths
from lachesis.pipeline.common.secrets import masked, remember_secrets, without_secrets
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.config.recipes import find_recipe
from lachesis.pipeline.config.sizes import is_byte_setting, parse_bytes
from lachesis.pipeline.config.toml_lines import NO_TOML, line_of
from lachesis.schemas.errors import ConfigError

__all__ = [
    "PREFIX",
    "ConfigSetting",
    "LoadedConfig",
    "absent_settings",
    "field_descriptions",
    "load",
    "settings",
]

PREFIX = "LACHESIS_"
"""Variables are PREFIX + path in capitals with `__` between levels: LACHESIS_BATCHING__BATCH_SIZE."""

_MAX_DEPTH = 32
_PARTS = re.compile(r"\[[^]]*\]|[^.\[]+")
"""Of a path in an error of msgspec: the name of a field, the index of an item, or `[...]` for a key of a table."""

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[C]):
    """A configuration and, by dotted path, the source of every value that is not a default."""

    config: C
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One resolved value, as `lachesis config show` prints it."""

    path: str
    value: Any
    origin: str
    description: str


def load(
    kind: type[C],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    sets: Iterable[str] = (),
) -> LoadedConfig[C]:
    """Return the configuration. Its secrets are masked from then on in all that this process prints.

    Raises `ConfigError` on an unknown key, a wrong type or an unreadable file; its text holds no secret.
    """
    try:
        return _load(kind, file, environ or {}, sets)
    except ConfigError as error:
        text = without_secrets(str(error))
        if text == str(error):
            raise
        raise ConfigError(text) from None


def _load(kind: type[C], file: Path | None, environ: Mapping[str, str], sets: Iterable[str]) -> LoadedConfig[C]:
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    text = "" if file is None else _read(file)
    places = _Places(str(file), text)
    if file is not None:
        written = _parse(file, text)
        remember_secrets(written)
        _Layer(str(file), origins, places).struct(kind, tree, written)
    for name, path in getattr(kind, "VARIABLES", {}).items():
        if given := environ.get(name):
            _lay(_Layer(f"${name}", origins), kind, tree, path.split("."), given)
    for name, given in sorted(without_service_variables(environ, PREFIX).items()):
        if name.startswith(PREFIX):
            path = name.removeprefix(PREFIX).lower().split("__")
            _lay(_Layer(f"${name}", origins), kind, tree, path, _value(given))
    for one in sets:
        key, equals, value = one.partition("=")
        if not equals:
            raise ConfigError(f"--set {one!r}: write it as key.path=value")
        path = key.strip().split(".")
        shown = f"--set {key.strip()}={masked(path[-1], value.strip())}"  # it goes into errors and origins
        _lay(_Layer(shown, origins), kind, tree, path, _value(value.strip()))
    if "recipe" in tree and "recipe" in _hints(kind):
        tree, origins = _over_recipe(kind, tree, origins)
    base = None if file is None else file.absolute().parent

    def base_of(path: str) -> Path:
        return base if base is not None and _origin(path, origins) == str(file) else Path.cwd()

    tree = resolve_paths(kind, tree, base_of)
    try:
        config = msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), kind, tree, origins, places)) from error
    _check_numbers(config, origins, places)
    return LoadedConfig(config, origins)


def _over_recipe(kind: type, tree: dict[str, Any], origins: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and their origins with those of the recipe wherever nothing else is set."""
    recipe = find_recipe(tree["recipe"])
    below: dict[str, Any] = {}
    below_origins: dict[str, str] = {}
    _Layer(f"recipe {recipe.name}", below_origins).struct(kind, below, recipe.settings)
    return _merged(below, tree), below_origins | origins


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of both, with the values of `above` where both have one."""
    found = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if both_tables else value
    return found


def _lay(layer: "_Layer", kind: type, tree: dict[str, Any], path: list[str], value: Any) -> None:
    nested = _nest(path, value)
    remember_secrets(nested)
    layer.struct(kind, tree, nested)


def settings(loaded: LoadedConfig[C]) -> list[ConfigSetting]:
    """Return every resolved value with its origin and description, in the order the structs declare them."""
    rows: list[ConfigSetting] = []

    def walk(struct: msgspec.Struct, prefix: str) -> None:
        descriptions = field_descriptions(type(struct))
        for name in struct.__struct_fields__:
            path, value = f"{prefix}{name}", getattr(struct, name)
            if value is msgspec.UNSET:
                continue  # another name of a setting
            if isinstance(value, msgspec.Struct):
                walk(value, f"{path}.")
            elif isinstance(value, dict) and value and all(isinstance(v, msgspec.Struct) for v in value.values()):
                for key, inner in value.items():
                    walk(inner, f"{path}.{key}.")
            else:
                rows.append(
                    ConfigSetting(
                        path, msgspec.to_builtins(value), _origin(path, loaded.origins), descriptions.get(name, "")
                    )
                )

    walk(loaded.config, "")
    return rows


def absent_settings(config: msgspec.Struct) -> list[ConfigSetting]:
    """Return the settings of tables that are not there, with their defaults, each kind of table once.

    In their paths NAME stands for the table's name and N for its place in a list, ROLE for that of an inference server.
    """
    shown, rows = {type(one) for one in _structs(config)}, []

    def walk(kind: type, prefix: str, *, is_absent: bool) -> None:
        descriptions, hints = field_descriptions(kind), get_type_hints(kind)
        for field in msgspec.structs.fields(kind):
            path = f"{prefix}{field.name}"
            inner, place = _table_in(hints[field.name])
            if inner is not None and (place or type(None) in get_args(hints[field.name])):
                if inner not in shown:
                    shown.add(inner)
                    walk(inner, f"{path}{_ROLE if path == 'inference' else place}.", is_absent=True)
            elif inner is not None:
                walk(inner, f"{path}.", is_absent=is_absent)
            elif is_absent and field.default is not msgspec.UNSET:
                default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
                value = None if default is msgspec.NODEFAULT else msgspec.to_builtins(default)
                origin = "needed, once its table is there" if default is msgspec.NODEFAULT else _ABSENT
                rows.append(ConfigSetting(path, value, origin, descriptions.get(field.name, "")))

    walk(type(config), "", is_absent=False)
    return rows


_ABSENT, _ROLE = "default, once its table is there", ".ROLE"


def _structs(value: Any) -> Iterator[msgspec.Struct]:
    """Yield a struct and all that it holds."""
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, name) for name in value.__struct_fields__]
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _structs(inner)


def _table_in(hint: Any) -> tuple[type | None, str]:
    """Return the struct that a field holds or may hold, and what of its path stands for one of several."""
    plain = _plain(hint)
    if get_origin(plain) in {dict, list}:
        inner = _plain(get_args(plain)[-1])
        return (inner, ".NAME" if get_origin(plain) is dict else "[N]") if _is_struct(inner) else (None, "")
    return (plain, "") if _is_struct(plain) else (None, "")


def _origin(path: str, origins: Mapping[str, str]) -> str:
    inner = [source for place, source in origins.items() if place.startswith(f"{path}.")]
    while path:
        if path in origins:
            return origins[path]
        path = path.rpartition(".")[0]
    return inner[-1] if inner else "default"


def _read(file: Path) -> str:
    try:
        return read_small_text(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except NO_TOML as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _value(text: str) -> Any:
    """Read a value as TOML; what is no TOML value is a string, so that quotes are rarely needed."""
    try:
        found = tomllib.loads(f"value = {text}")
    except NO_TOML:
        return text
    return found["value"] if len(found) == 1 else text  # more than a value: lines that would pass unseen


def _nest(path: list[str], value: Any) -> dict[str, Any]:
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"setting {'.'.join(path)[:80]!r}...: nested deeper than {_MAX_DEPTH} levels")
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


class _Places(NamedTuple):
    """The configuration file and its text, by which an error names the line of a setting."""

    file: str
    text: str

    def name(self, path: str, source: str) -> str:
        """Return the source of the setting `path`, with its line if that is the file."""
        line = line_of(self.text, path) if source == self.file else None
        return source if line is None else f"{source}, line {line}"


_NO_FILE = _Places("", "")


@dataclass(frozen=True, slots=True)
class _Layer:
    """One source being laid over the tree; `origins` remembers which values it set."""

    source: str
    origins: dict[str, str]
    places: _Places = _NO_FILE

    def struct(self, kind: Any, tree: dict[str, Any], new: Mapping[str, Any], prefix: str = "") -> None:
        hints, aliases = _hints(kind), getattr(kind, "ALIASES", {})
        for written, value in new.items():
            key = written if aliases.get(written) in new else aliases.get(written, written)
            if key not in hints:
                is_table = isinstance(value, Mapping) and "DESCRIPTIONS" in vars(kind)
                extra = ", which no installed extension adds" if is_table else ""
                raise ConfigError(
                    f"{self.places.name(prefix + written, self.source)}: unknown setting {prefix + key!r}{extra}"
                    f"{nearest(key, hints, prefix=prefix)}"
                )
            self.value(hints[key], tree, key, value, prefix)

    def value(self, hint: Any, tree: dict[str, Any], key: str, value: Any, prefix: str) -> None:
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and _is_struct(hint):
            self.struct(hint, self._table(tree, key), value, f"{path}.")
        elif isinstance(value, Mapping) and get_origin(hint) is dict:
            inner = self._table(tree, key)
            for name, item in value.items():
                self.value(get_args(hint)[1], inner, name, item, f"{path}.")
        else:
            tree[key] = self._size(path, value) if hint is int and is_byte_setting(key) else value
            self.origins[path] = self.source

    def _size(self, path: str, value: Any) -> Any:
        """Return a size in bytes; a text such as 1GiB is one."""
        try:
            return parse_bytes(value) if isinstance(value, str) else value
        except ConfigError as error:
            raise ConfigError(f"{path}: {error} (from {self.places.name(path, self.source)})") from error

    def _table(self, tree: dict[str, Any], key: str) -> dict[str, Any]:
        """Return the table under `key`; a plain value that an earlier source put there gives way."""
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        table: dict[str, Any] = tree[key]
        return table


def _check_numbers(config: Any, origins: Mapping[str, str], places: _Places) -> None:
    """Raise `ConfigError` for a declared number that is not finite, and for an integer beyond 64 bits anywhere."""
    for path, number, declared in _numbers(config, ""):
        fault = None
        if declared and isinstance(number, float) and not math.isfinite(number):
            fault = "must be a finite number"
        elif isinstance(number, int) and not -(1 << 63) <= number < 1 << 64:
            fault = "the number does not fit into 64 bits"
        if fault is not None:
            raise ConfigError(f"{path}: {fault} (from {places.name(path, _origin(path, origins))})")


def _numbers(value: Any, path: str, *, declared: bool = True) -> Iterator[tuple[str, float, bool]]:
    """Yield the path of every number, the number, and whether a field declares it: free-form tables do not."""
    if isinstance(value, int | float):
        yield path, value, declared
    elif isinstance(value, msgspec.Struct):
        for name, hint in _hints(type(value)).items():
            is_free = get_args(hint)[-1:] == (Any,)
            below = f"{path}.{name}" if path else name
            yield from _numbers(getattr(value, name), below, declared=declared and not is_free)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}", declared=declared)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]", declared=declared)


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return each field's plain type, without Annotated and None."""
    return {name: _plain(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def _plain(hint: Any) -> Any:
    """Return what a union stands for: its one type, or its one struct, for which other types are shorthand."""
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint
    kinds = [arg for arg in get_args(hint) if arg not in {type(None), msgspec.UnsetType}]
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if _is_struct(kind)]
    return kinds[0] if len(kinds) == 1 else hint


@functools.cache
def field_descriptions(kind: type) -> dict[str, str]:
    """Return the text written under each field of a struct, which Python itself does not keep.

    Fields that were added to it are described by its `DESCRIPTIONS`; the others are written in what it extends.
    """
    written = next(base for base in kind.__mro__ if "DESCRIPTIONS" not in vars(base))
    body = ast.parse(textwrap.dedent(inspect.getsource(written))).body[0]
    found = {}
    for field, note in itertools.pairwise(body.body if isinstance(body, ast.ClassDef) else []):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(note, ast.Expr) and isinstance(note.value, ast.Constant) and isinstance(note.value.value, str):
            found[field.target.id] = " ".join(note.value.value.split())
    return found | getattr(kind, "DESCRIPTIONS", {})


def _explain(
    text: str, kind: type[msgspec.Struct], tree: dict[str, Any], origins: Mapping[str, str], places: _Places
) -> str:
    """Put the dotted path and the source of the value in place of msgspec's `$.a.b`, and say what could stand there."""
    message, _, where = text.partition(" - at `$")
    where = where.strip("`.")
    if not where:
        return message
    message = message.replace("`object`", "a table { key = value }")
    hint = _hint_at(kind, where)
    if message.startswith("Invalid enum value") and get_origin(hint) is Literal:
        message += nearest(message.split("'")[1], map(str, get_args(hint)))
    path = place = _named_path(where, text, kind, tree)
    if message.startswith("Object contains unknown field") and _is_struct(hint):
        unknown = message.split("`")[1]
        message += nearest(unknown, _hints(hint))
        place = f"{path}.{unknown}"
    source = _origin(re.sub(r"\[[0-9]+\]", "", path), origins)
    return f"{path}: {message[:1].lower()}{message[1:]} (from {places.name(place, source)})"


def _named_path(where: str, text: str, kind: type[msgspec.Struct], tree: dict[str, Any]) -> str:
    """Return a path of msgspec's with a key in place of each `[...]`: the one that alone makes the same error."""
    tree = copy.deepcopy(tree)
    path, value = "", tree
    for part in _PARTS.findall(where):
        key: Any = int(part[1:-1]) if part[1:-1].isdigit() and part.startswith("[") else part
        if part == "[...]":
            for key, inner in dict(value).items():
                value.clear()
                value[key] = inner
                try:
                    msgspec.convert(tree, kind)
                except msgspec.ValidationError as error:
                    if str(error) == text:
                        break
        value = value[key]
        path += part if isinstance(key, int) else f".{key}"
    return path.removeprefix(".")


def _hint_at(hint: Any, where: str) -> Any:
    """Return the type of what stands at a path such as `a.b[0].c` or `a[...].c` (any key) of a struct."""
    for part in _PARTS.findall(where):
        hint = _plain(get_args(hint)[-1]) if part.startswith("[") else _hints(hint)[part]
    return hint
