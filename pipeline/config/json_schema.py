"""Makes the JSON Schema of a configuration, for editors: types, ranges, defaults and help.

Guarantees that whatever `load` accepts in a TOML file for reasons of its own is accepted here as well: sizes as texts
("1GiB") and other names of a setting (`ALIASES`). No schema can express what only `__post_init__` checks: relations
between settings.
"""

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from lachesis.pipeline.config.load import field_descriptions
from lachesis.pipeline.config.sizes import is_byte_setting

__all__ = ["json_schema"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIZE = {"type": "string", "description": 'A size, such as "512MiB" or "1GiB".'}


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a configuration's file."""
    (root,), definitions = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    structs = {struct.__name__: struct for struct in _structs(kind, set())}
    for name, definition in definitions.items():
        definition["description"] = inspect.cleandoc(definition.get("description", ""))
        if name in structs:
            _describe(structs[name], definition["properties"])
    return {"$schema": _DIALECT, **root, "$defs": definitions}


def _describe(kind: type[msgspec.Struct], properties: dict[str, Any]) -> None:
    """Add to each property what is written under its field, and what the loader accepts in addition to its type."""
    for name, text in field_descriptions(kind).items():
        found = properties.get(name)
        if found is None:
            continue
        if is_byte_setting(name):
            default = {"default": found.pop("default")} if "default" in found else {}
            found = {"anyOf": [*found.get("anyOf", [found]), _SIZE], **default}
        properties[name] = {**found, "description": text}
    for other, name in getattr(kind, "ALIASES", {}).items():
        properties.setdefault(other, {**properties[name], "description": f"Another name of {name}."})


def _structs(hint: Any, known: set[Any]) -> Iterator[type[msgspec.Struct]]:
    """Yield every struct type in a type, its own fields' types included."""
    inner = get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in known:
        known.add(hint)
        yield hint
        inner = tuple(get_type_hints(hint).values())
    for one in inner:
        yield from _structs(one, known)
