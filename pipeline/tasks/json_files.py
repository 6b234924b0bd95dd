"""Reads the rows of a `.json` file: a list of objects, lines, one object, or a data frame of pandas."""

import json
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.text_encoding import read_text
from lachesis.pipeline.tasks.row_stores import DatasetRow, JsonRows, Rows, SequenceRows, rows_of_lines
from lachesis.schemas.errors import ConfigError

__all__ = ["read_json"]

_ROLE = ("role", "from")


def read_json(path: Path, data: bytes, names: frozenset[str]) -> Rows:
    """Return the rows. `names`: columns that will be read; they distinguish rows from columns.

    Raises `ConfigError` if there are no rows, or if rows and columns cannot be distinguished.
    """
    text = read_text(data).encode("utf-8", "surrogatepass")
    first = text.lstrip()[:1]
    try:
        if first == b"[":
            return JsonRows(str(path), map(bytes, msgspec.json.decode(text, type=list[msgspec.Raw])))
    except (msgspec.MsgspecError, RecursionError) as error:
        found = _lenient(text)
        if isinstance(found, list):
            return SequenceRows(_objects(found, path))
        raise ConfigError(f"data set {path}: it is no JSON list of objects: {error}") from error
    if first == b"{":
        lines = text.strip().split(b"\n")
        if len(lines) > 1 and isinstance(_lenient(lines[0]), dict):
            return rows_of_lines(path, text)
        found = _lenient(text)
        if isinstance(found, dict) and _is_row(found, names, path):
            return JsonRows(str(path), [text.strip()])
        rows = _frame(found, names, path)
        if rows is not None:
            return SequenceRows(_objects(rows, path))
    raise ConfigError(f"data set {path}: it is no JSON list of objects, and none of pandas' forms of a data frame")


def _lenient(data: bytes) -> Any:
    """Return the value that Python's own reader gives for JSON, `NaN` included; None if it is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_row(found: dict[str, Any], names: frozenset[str], path: Path) -> bool:
    """Return whether an object is a row, not columns: one of its values is a text, a number, or a conversation."""
    chats = {name: found[name] for name in names if _is_chat(found.get(name))}
    if not chats:
        return not names.isdisjoint(found) and any(not isinstance(value, list | dict) for value in found.values())
    may_be_columns = len(found) > 1 and len({_length(value) for value in found.values()}) == 1
    for name, turns in chats.items():
        roles = {turn.get("role") or turn.get("from") for turn in turns}
        if may_be_columns and len(turns) > 1 and len(roles) == 1:
            raise ConfigError(
                f"data set {path}: {name!r} may be the turns of one row, or a column with a turn in each row; write a "
                "list of objects, one a row"
            )
    return True


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else -1


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and any(isinstance(turn.get(name), str) for name in _ROLE) for turn in value)
    )


def _frame(found: Any, names: frozenset[str], path: Path) -> list[Any] | None:
    """Return the rows of a data frame by columns or rows, of {columns, data} or {data: [objects]}; else None."""
    if not isinstance(found, dict):
        return None
    data, columns = found.get("data"), found.get("columns")
    if isinstance(data, list) and isinstance(columns, list):
        whole = all(isinstance(row, list) and len(row) == len(columns) for row in data)
        return [dict(zip(map(str, columns), row, strict=True)) for row in data] if whole else None
    if isinstance(data, list):
        return data
    if len(found) == 1 and isinstance(only := next(iter(found.values())), list):
        return only
    if names.isdisjoint(found):
        if found and all(_has_rows(value, names) for value in found.values()):
            raise ConfigError(
                f"data set {path}: it holds several lists of rows, {', '.join(found)[:80]}; write the one that is "
                "meant to a file of its own"
            )
        rows = list(found.values())
        if all(isinstance(row, dict) for row in rows) and any(not names.isdisjoint(row) for row in rows):
            return rows  # under their labels: pandas' orient="index"
    return _columns_of(found) if found else None


def _has_rows(value: Any, names: frozenset[str]) -> bool:
    return isinstance(value, list) and any(isinstance(row, dict) and not names.isdisjoint(row) for row in value)


def _columns_of(found: dict[str, Any]) -> list[Any] | None:
    """Return the rows of columns that are lists of one length, or have the same labels; else None."""
    columns = list(found.values())
    if all(isinstance(cells, list) and len(cells) == len(columns[0]) for cells in columns):
        return [dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True)]
    if all(isinstance(cells, dict) and list(cells) == list(columns[0]) for cells in columns):
        return [{name: cells[label] for name, cells in found.items()} for label in columns[0]]
    return None


def _objects(rows: list[Any], path: Path) -> list[DatasetRow]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"data set {path} row {number}: it is {row!r:.60}, no object")
    return rows
