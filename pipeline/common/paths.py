"""Resolves paths in a configuration relative to the file or folder that they are written in.

Pure, except for the check whether a model's folder exists.

The types also say what a setting reaches beyond numbers and choices: `Address` of a server that is queried or served,
`ProgramArguments`, `CodeParams` of code that the configuration names. `reach_of` returns this for a setting's path. An
`OpenSwitch` lets other users or processes of the machine in, when it is set in one of its two ways.

A setting is a path by its type: `FilePath` a file or folder; `ProgramPath` a program, by its path or by a name on PATH;
`ModelPath` a model's folder or its Hugging Face id; `CodePath` a name, `module:NAME` or `path/to/file.py:NAME`;
`TemplatePath` a file with a chat template, or the text of one. The meaning of parameters of user code is not known; for
our own code, `PARAM_PATHS` of a struct gives it by kind. A parameter `folder` that is such a path and is not given is
the folder of the file that names the kind.
"""

import functools
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from lachesis.schemas.errors import ConfigError

__all__ = [
    "Address",
    "CodeParams",
    "CodePath",
    "FilePath",
    "ModelPath",
    "OpenSwitch",
    "ProgramArguments",
    "ProgramPath",
    "TemplatePath",
    "code_name",
    "expand_home",
    "opens_run",
    "reach_of",
    "resolve_paths",
]

_KEY = "path"
FilePath = Annotated[str, Meta(extra={_KEY: "file"})]
ProgramPath = Annotated[str, Meta(extra={_KEY: "program"})]
ModelPath = Annotated[str, Meta(extra={_KEY: "model"})]
CodePath = Annotated[str, Meta(extra={_KEY: "code"})]
TemplatePath = Annotated[str, Meta(extra={_KEY: "template"})]
_REACH = "reach"
Address = Annotated[str, Meta(extra={_REACH: "address"})]
ProgramArguments = Annotated[list[str], Meta(extra={_REACH: "arguments of a program"})]
CodeParams = Annotated[dict[str, Any], Meta(extra={_REACH: "parameters of code"})]
_OPENS = "opens"
_PARAMS_OF, _DEFAULT_TASKS = "params of ", "dataset"
"""Of a parameter that holds those of another environment: its mark names the parameter with that one's kind."""
OpenSwitch = Annotated[bool, Meta(extra={_OPENS: "run"})]


def resolve_paths(kind: Any, tree: Any, base_of: Callable[[str], Path], path: str = "") -> Any:
    """Return `tree`, the plain values of a struct type `kind`, with its paths made absolute.

    `base_of` returns the folder that the setting of a dotted path is relative to.
    """
    hint, marker = _unwrap(kind)
    if marker is not None:
        return _absolute(marker, tree, base_of(path)) if isinstance(tree, str) else tree
    if isinstance(tree, dict) and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = _field_types(hint)
        inner = {key: hints.get(key, Any) for key in tree}
        tree = _with_param_paths(hint, tree, base_of, path)
    elif isinstance(tree, dict) and get_origin(hint) is dict:
        inner = dict.fromkeys(tree, get_args(hint)[1])
    elif isinstance(tree, list) and get_origin(hint) is list:
        return [resolve_paths(get_args(hint)[0], item, base_of, path) for item in tree]
    else:
        return tree
    return {key: resolve_paths(inner[key], value, base_of, f"{path}.{key}".strip(".")) for key, value in tree.items()}


def code_name(reference: str) -> str:
    """Return a `CodePath` without the folders of its file: what names the code wherever it lies."""
    place, colon, name = reference.rpartition(":")
    return f"{Path(place).name}:{name}" if colon and place.endswith(".py") else reference


def _unwrap(hint: Any) -> tuple[Any, str | None]:
    """Return a type without None and Annotated, and which kind of path it marks, if any."""
    if get_origin(hint) in {Union, types.UnionType}:
        plain = [arg for arg in get_args(hint) if arg is not type(None)]
        hint = plain[0] if len(plain) == 1 else hint
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        return hint, next((kind for note in notes if (kind := _extra(note, _KEY)) is not None), None)
    return hint, None


def _extra(note: Any, key: str) -> str | None:
    found: str | None = (note.extra or {}).get(key) if isinstance(note, Meta) else None
    return found


def reach_of(kind: Any, path: str) -> tuple[str, int] | None:
    """Return what the setting at a dotted path reaches: code, a file, a program, an address...

    It counts if anything in the setting does. With it comes the number of parts of the path that say so. None: the
    setting holds numbers, choices and names alone.
    """
    hint, parts = kind, path.split(".")
    for place, part in enumerate(parts):
        plain, reach = _reached(hint)
        if reach is not None:
            return reach, place
        hint = _hint_inside(plain, part)
    reach = _anything_reached(hint, set())
    return None if reach is None else (reach, len(parts))


def opens_run(kind: Any, path: str) -> bool:
    """Whether the setting at a dotted path is an `OpenSwitch`."""
    hint = kind
    for part in path.split("."):
        hint = _hint_inside(_reached(hint)[0], part)
    return any(_extra(note, _OPENS) for note in getattr(hint, "__metadata__", ()))


@functools.cache
def _field_types(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return each field's type with its marks. Python itself would compute them again each time."""
    return get_type_hints(kind, include_extras=True)


def _hint_inside(plain: Any, part: str) -> Any:
    """Return the type of one part of a struct or of a table, Any where there is none of that name."""
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return _field_types(plain).get(part, Any)
    return get_args(plain)[1] if get_origin(plain) is dict else Any


def _reached(hint: Any) -> tuple[Any, str | None]:
    """Return a type without None, UNSET and Annotated, and what it reaches itself."""
    if get_origin(hint) in {Union, types.UnionType}:
        inner = [arg for arg in get_args(hint) if arg not in (type(None), msgspec.UnsetType)]
        structs = [arg for arg in inner if isinstance(arg, type) and issubclass(arg, msgspec.Struct)]
        hint = (structs or inner)[0]
    if get_origin(hint) is Annotated:
        plain, *notes = get_args(hint)
        return plain, next((found for note in notes if (found := _extra(note, _KEY) or _extra(note, _REACH))), None)
    return hint, None


def _anything_reached(hint: Any, seen: set[Any]) -> str | None:
    plain, reach = _reached(hint)
    if reach is not None:
        return reach
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct) and plain not in seen:
        seen.add(plain)
        inner = _field_types(plain)
        hints = [inner[name] for name in plain.__struct_fields__]
    else:
        hints = [arg for arg in get_args(plain) if arg is not Any]
    return next((found for one in hints if (found := _anything_reached(one, seen)) is not None), None)


def _with_param_paths(
    hint: type[msgspec.Struct], tree: dict[str, Any], base_of: Callable[[str], Path], path: str
) -> dict[str, Any]:
    kinds: Mapping[Any, Mapping[str, str]] = getattr(hint, "PARAM_PATHS", {})
    given, kind = tree.get("params", {}), tree.get("kind")
    if not isinstance(given, dict) or not isinstance(kind, str):
        return tree  # not checked yet
    found = _param_paths(kinds, kind, given, base_of, f"{path}.params".strip("."))
    if "folder" in kinds.get(kind, {}) and "folder" not in given:
        found["folder"] = str(base_of(f"{path}.kind".strip(".")))
    return {**tree, "params": given | found} if found else tree


def _param_paths(
    kinds: Mapping[Any, Mapping[str, str]],
    kind: str,
    given: Mapping[str, Any],
    base_of: Callable[[str], Path],
    path: str,
) -> dict[str, Any]:
    """Return those of the parameters of a kind that are paths, absolute."""
    found: dict[str, Any] = {}
    for name, marker in kinds.get(kind, {}).items():
        value, place = given.get(name), f"{path}.{name}"
        if marker.startswith(_PARAMS_OF) and isinstance(value, dict):
            inner = given.get(marker.removeprefix(_PARAMS_OF), _DEFAULT_TASKS)
            found[name] = value | _param_paths(kinds, inner, value, base_of, place) if isinstance(inner, str) else value
        elif isinstance(value, str):
            found[name] = _absolute(marker, value, base_of(place))
        elif isinstance(value, list):
            found[name] = [_absolute(marker, one, base_of(place)) if isinstance(one, str) else one for one in value]
    return found


def expand_home(path: Path) -> Path:
    """Return a path that begins with ~ in full. Raises `ConfigError` for a user without a home."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: this user (uid {os.getuid()}) has no home folder: set HOME, or write the path in full"
        ) from error


def _absolute(marker: str, text: str, base: Path) -> str:
    if marker == "code":
        place, colon, name = text.rpartition(":")
        return f"{_join(base, place)}:{name}" if colon and place.endswith(".py") else text
    if marker == "template" and "{" in text:
        return text
    if marker == "program" and "/" not in text:
        return text
    if marker == "model" and not text.startswith(("./", "../", "~")) and not (base / text).is_dir():
        return text  # an id, or a missing folder: loading it reports that
    return _join(base, text)


def _join(base: Path, text: str) -> str:
    """Return the absolute path; an empty one stays, which is no path."""
    path = Path(text)
    if path.parts[:1] == ("~",):  # ~name is more often a file of that name than somebody's home
        path = expand_home(path)
    return str(base / path) if text else text
