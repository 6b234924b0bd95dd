"""Finds the columns of a row by name, inside others by dots, and fills them into a template. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.tasks.literals import literal_in
from lachesis.pipeline.tasks.references import reference_text
from lachesis.schemas.errors import ConfigError

__all__ = [
    "INSTRUCTION",
    "SECOND_PARTS",
    "braced_names",
    "column",
    "fill_template",
    "is_blank",
    "is_missing",
    "opened",
    "template_columns",
]

INSTRUCTION, SECOND_PARTS = "instruction", ("input", "context")
"""Alpaca's and Dolly's columns: a question in two parts, of which the second may be empty."""

_MAX_NAMES = 40
_ABSENT: Final = object()
_BRACES = re.compile(
    r"\{\{\{(?P<triple_braced>[^{}]+)\}\}\}|\{\{(?P<escaped>[^{}]*)\}\}|\{(?P<name>[^{}]+)\}",
)
_WORD = re.compile(r"[^\W\d][\w.]*(?:![rsa])?(?::.*)?")


def column(row: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a row's value in the column of this name, or in the inner column that its dots lead to.

    If there is none, raises `ConfigError`, which names the nearest column.
    """
    value = _find(row, name)
    if value is _ABSENT:
        names = list(_names(row))[:_MAX_NAMES]
        raise ConfigError(f"{where}: it has no column {name!r}{nearest(name, names)}; it has {', '.join(names)}")
    return value


def is_missing(value: Any) -> bool:
    """Whether a value is missing: null, or what data frames write instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Whether a value is missing, or a text of blanks alone."""
    return is_missing(value) or (isinstance(value, str) and not value.strip())


def _find(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    found: Any = row
    parts = name.split(".")
    while parts:
        found = opened(found)
        if isinstance(found, Mapping):
            size = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in found), None)
            if size is None:
                return _ABSENT
            found, parts = found[".".join(parts[:size])], parts[size:]
        elif isinstance(found, list) and parts[0].isdigit() and int(parts[0]) < len(found):
            found, parts = found[int(parts[0])], parts[1:]
        elif found is None:
            return None  # the outer column is missing in this row
        else:
            return _ABSENT
    return found


def opened(value: Any) -> Any:
    """Return the content of a JSON text, in which tables store columns that hold others; else the value."""
    found = literal_in(value) if isinstance(value, str) else None
    return value if found is None else found


def _names(row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield name
        inner = opened(value)
        if isinstance(inner, Mapping):
            yield from (f"{name}.{key}" for key in inner)


def braced_names(template: str) -> list[str]:
    """Return the names in braces in a template, without a format after them."""
    given = [match["triple_braced"] or match["name"] for match in _BRACES.finditer(template)]
    return [re.split(r"[!:]", name, maxsplit=1)[0] for name in given if name is not None]


def template_columns(template: str, rows: Sequence[Mapping[str, Any]], *, needed: bool = True) -> list[str]:
    """Return the columns that a template names and that one of the rows has.

    Raises `ConfigError` if it names none although one is `needed`, or if a name is nearly that of a column of the first
    row.
    """
    found: dict[str, None] = {}
    for match in _BRACES.finditer(template):
        given = match["triple_braced"] or match["name"]
        if given is None:
            continue
        name = next((name for row in rows if (name := _column_of(given, row)) is not None), None)
        if name is not None:
            found[name] = None
        elif _WORD.fullmatch(given) and "did you mean" in nearest(given, _names(rows[0])):
            column(rows[0], given, "template")
    if not found and needed:
        words = [
            match["name"] for match in _BRACES.finditer(template) if match["name"] and _WORD.fullmatch(match["name"])
        ]
        if words:
            column(rows[0], words[0], "template")
        raise ConfigError(f"template {template!r:.80} cannot be filled: it names no column in braces")
    return list(found)


def fill_template(template: str, row: Mapping[str, Any], where: str, columns: Sequence[str]) -> str:
    r"""Return the template with the row's `columns` for `{column}`; other braces stay, `\boxed{}` say.

    `{{` and `}}` around a text stand for single braces. The second part of an instruction, in Alpaca's and Dolly's
    columns, may be missing. Where a column is empty, no blanks are left at the ends. Raises `ConfigError` if the row
    has no value in another column.
    """
    optional = SECOND_PARTS if INSTRUCTION in columns else ()
    empty = [name for name in columns if _is_empty(column(row, name, where), optional=name in optional)]

    def fill(match: re.Match[str]) -> str:
        if match["escaped"] is not None:
            return "{" + match["escaped"] + "}"
        given = match["triple_braced"] or match["name"]
        name = given if given in columns else _without_format(given, columns)
        if name is None:
            return match[0]
        value = "" if name in empty else column(row, name, where)
        if is_missing(value):
            raise ConfigError(f"{where}: its {name!r}, of which the template makes the prompt, is missing")
        text = value if name in empty else _formatted(given[len(name) :], value, where)
        return "{" + text + "}" if match["triple_braced"] is not None else text

    text = _BRACES.sub(fill, template)
    return text.strip() if empty else text


def _is_empty(value: Any, *, optional: bool) -> bool:
    return (isinstance(value, str) and not value.strip()) or (optional and is_missing(value))


def _without_format(given: str, columns: Sequence[str]) -> str | None:
    name = re.split(r"[!:]", given, maxsplit=1)[0]
    return name if name in columns else None


def _column_of(given: str, row: Mapping[str, Any]) -> str | None:
    """Return the column named in braces, perhaps with a format after it; None if it is no column."""
    if _find(row, given) is not _ABSENT:
        return given
    name = re.split(r"[!:]", given, maxsplit=1)[0]
    return name if name != given and name and _find(row, name) is not _ABSENT else None


def _formatted(form: str, value: Any, where: str) -> str:
    if form:
        try:
            return ("{0" + form + "}").format(value)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise ConfigError(f"{where}: {value!r:.60} cannot be filled in as {form!r}: {error}") from error
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not isinstance(value, bool):
        return reference_text(value, where)
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    return str(value)
