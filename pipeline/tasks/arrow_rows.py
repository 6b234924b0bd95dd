"""Gives the rows of an Arrow table, which a stranger's file may have filled.

Guarantees that a row takes no more memory than its table counts for it: a text that many rows refer to is written out
for each of them when the table is opened, within the bound on memory at that time.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lachesis.pipeline.tasks.row_stores import MAX_ROW_BYTES, DatasetRow, Rows
from lachesis.schemas.errors import ConfigError

__all__ = ["ArrowRows", "arrow_errors"]

_MAX_ROWS = 100_000_000
"""Rows of nulls and of repeated values take almost no bytes; looking at each would take for ever."""
_ROWS_AT_ONCE = 4096
_BYTES_AT_ONCE = 16 << 20


def arrow_errors() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises on a damaged or hostile file.

    They include errors of texts that are no UTF-8, of times that Python cannot represent, and of unknown time zones.
    """
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError)


class ArrowRows(Rows):
    """The rows of an Arrow table, each made when it is requested.

    Raises `ConfigError` if there are too many rows or too large ones, and `MemoryError`.
    """

    def __init__(self, table: Any, where: str) -> None:
        names = list(table.column_names)
        self.repeated = frozenset(name for name in names if names.count(name) > 1)
        self._where = where
        if table.num_rows > _MAX_ROWS:
            raise ConfigError(f"data set {where}: it has {table.num_rows} rows; at most {_MAX_ROWS} are read")
        self._table = _written_out(table).combine_chunks()
        self._form = {"maps_as_pydicts": "lossy"} if any(map(_holds_map, self._table.schema.types)) else {}
        self.size_bytes = int(self._table.nbytes)
        self._check_rows(0, len(self))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> DatasetRow:
        table = self._table
        try:
            return {
                name: cells[index].as_py(**self._form)
                for name, cells in zip(table.column_names, table.columns, strict=True)
            }
        except arrow_errors() as error:
            raise ConfigError(f"data set {self._where} row {index + 1}: {error}") from error

    def __iter__(self) -> Iterator[DatasetRow]:
        row_bytes = max(1, self.size_bytes // max(1, len(self)))
        first = 0
        for batch in self._table.to_batches(max_chunksize=max(1, min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // row_bytes))):
            try:
                columns = [cells.to_pylist(**self._form) for cells in batch.columns]
            except arrow_errors() as error:
                place = f"rows {first + 1} to {first + batch.num_rows}"
                raise ConfigError(f"data set {self._where} {place}: {error}") from error
            first += batch.num_rows
            for cells in zip(*columns, strict=True):
                yield dict(zip(self._table.column_names, cells, strict=True))

    def _check_rows(self, start: int, end: int) -> None:
        """Raise `ConfigError` if one of these rows is too large."""
        if self._table.slice(start, end - start).nbytes <= MAX_ROW_BYTES:
            return
        if end - start == 1:
            raise ConfigError(f"data set {self._where} row {end}: it is larger than {MAX_ROW_BYTES >> 20} MiB")
        middle = (start + end) // 2
        self._check_rows(start, middle)
        self._check_rows(middle, end)


def _written_out(table: Any) -> Any:
    """Return the table with the values of each row in place of references to a dictionary or to a run."""
    import pyarrow as pa

    schema = pa.schema([pa.field(field.name, _plain(field.type)) for field in table.schema])
    if not schema.equals(table.schema.remove_metadata()):
        table = table.cast(schema)
    for place, field in enumerate(table.schema):
        if field.type in {pa.float16(), pa.float32()}:
            table = table.set_column(place, field.name, _shortest(table.column(place)))
    return table


def _shortest(column: Any) -> Any:
    """Return numbers of 16 or 32 bits as the shortest decimals that stand for them: 0.1, not 0.10000000149."""
    import pyarrow as pa

    numbers = [cell.as_py() for cell in column] if column.type == pa.float16() else None
    if numbers is not None:
        shown = [None if one is None else str(np.float16(one)) for one in numbers]
        return pa.chunked_array([pa.array(shown, pa.string()).cast(pa.float64())])
    return column.cast(pa.string()).cast(pa.float64())


def _holds_map(kind: Any) -> bool:
    """Return whether a type is a map, or has one inside: Java's and Spark's form of an object."""
    import pyarrow as pa

    return pa.types.is_map(kind) or any(_holds_map(kind.field(place).type) for place in range(kind.num_fields))


def _plain(kind: Any) -> Any:
    """Return a type without dictionaries and runs."""
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, _plain(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    return pa.list_(_plain(kind.value_type)) if types.is_list(kind) else kind
