"""Resolves paths in a configuration relative to the file or folder that they are written in.

Pure, except for the check whether a model's folder exists.

A setting is a path by its type: `FilePath` a file or folder; `ProgramPath` a program, by its path or by a name on PATH;
`ModelPath` a model's folder or its Hugging Face id; `CodePath` a name, `module:NAME` or `path/to/file.py:NAME`;
`TemplatePath` a file with a chat template, or the text of one. What
the parameters of others' code mean is not known; of our own, `PARAM_PATHS` of a struct says it by kind.
"""

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

__all__ = ["CodePath", "FilePath", "ModelPath", "ProgramPath", "TemplatePath", "code_name", "resolve_paths"]

_KEY = "path"
FilePath = Annotated[str, Meta(extra={_KEY: "file"})]
ProgramPath = Annotated[str, Meta(extra={_KEY: "program"})]
ModelPath = Annotated[str, Meta(extra={_KEY: "model"})]
CodePath = Annotated[str, Meta(extra={_KEY: "code"})]
TemplatePath = Annotated[str, Meta(extra={_KEY: "template"})]


def resolve_paths(kind: Any, tree: Any, base_of: Callable[[str], Path], path: str = "") -> Any:
    """Return `tree`, the plain values of a struct type `kind`, with its paths made absolute.

    `base_of` returns the folder that the setting of a dotted path is relative to.
    """
    hint, marker = _unwrap(kind)
    if marker is not None:
        return _absolute(marker, tree, base_of(path)) if isinstance(tree, str) else tree
    if isinstance(tree, dict) and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        hints = get_type_hints(hint, include_extras=True)
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
        return hint, next((note.extra[_KEY] for note in notes if isinstance(note, Meta) and note.extra), None)
    return hint, None


def _with_param_paths(
    hint: type[msgspec.Struct], tree: dict[str, Any], base_of: Callable[[str], Path], path: str
) -> dict[str, Any]:
    kinds: Mapping[Any, Mapping[str, str]] = getattr(hint, "PARAM_PATHS", {})
    given, markers = tree.get("params"), kinds.get(tree.get("kind"), {})
    if not isinstance(given, dict):
        return tree
    paths = {
        name: _absolute(marker, given[name], base_of(f"{path}.params.{name}".strip(".")))
        for name, marker in markers.items()
        if isinstance(given.get(name), str)
    }
    return {**tree, "params": given | paths}


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
        path = path.expanduser()
    return str(base / path) if text else text
