"""Rows as Parquet, by pyarrow, with the schema's name and what was exported in the file's metadata.

Memory is bounded by the rows that are written at once, or read at once. A file says itself how large its rows are, in
few bytes: the reader bounds what that takes (`reader.MAX_READING_BYTES`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.offline.archive.logic.exact_array import exact_array
from lachesis.pipeline.offline.archive.logic.row import SCHEMA, RolloutRow
from lachesis.pipeline.tasks.arrow_rows import arrow_errors
from lachesis.schemas.codec import MAX_ERROR_CHARS
from lachesis.schemas.errors import ConfigError, SchemaError

__all__ = ["METADATA_KEY", "ParquetWriter", "arrow_schema", "count_rows", "load_pyarrow", "read_rows"]

METADATA_KEY = b"lachesis"
_ROWS_READ = 64
_ROW_GROUP_TOKENS = 1 << 20
"""Tokens from which rows are written as a row group: some 10 MB of columns."""
_TOKENS = {"tokens": "int32", "loss_mask": "int8", "logprobs": "float32", "token_advantages": "float32"}


class ParquetWriter:
    """Writes rows to a file that is open for that. Raises `StartupError` where pyarrow is not installed."""

    def __init__(self, file: BinaryIO, about: Mapping[str, Any]) -> None:
        schema = arrow_schema()
        import pyarrow.parquet as pq

        self._schema = schema.with_metadata({METADATA_KEY: msgspec.json.encode({"schema": SCHEMA, **about})})
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd")
        self._waiting: list[RolloutRow] = []
        self._tokens = 0

    def write(self, rows: Sequence[RolloutRow]) -> None:
        self._waiting += rows
        self._tokens += sum(len(row.tokens) + 64 for row in rows)
        if self._tokens >= _ROW_GROUP_TOKENS:
            self._flush()

    def close(self) -> None:
        """Write what is left, and the footer, without which it is no Parquet file."""
        if self._waiting:
            self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """Let go of a file that is not to be finished, while it is open."""
        with suppress(OSError, ValueError):
            self._writer.close()

    def _flush(self) -> None:
        self._writer.write_batch(_batch(load_pyarrow(), self._schema, self._waiting))
        self._waiting, self._tokens = [], 0


def read_rows(path: Path) -> Iterator[tuple[int, RolloutRow | SchemaError]]:
    """Yield the rows of a file, or why there is none, with their numbers from 1.

    Raises `StartupError` without pyarrow, `ConfigError` where it is no Parquet file.
    """
    load_pyarrow()
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            columns = [name for name in file.schema_arrow.names if name in RolloutRow.__struct_fields__]
            _check_lists(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=_ROWS_READ, columns=columns, use_threads=False):
                plain = batch.select([name for name in columns if name not in _TOKENS]).to_pylist()
                arrays = {name: _arrays(batch.column(name), name) for name in columns if name in _TOKENS}
                for i, values in enumerate(plain):
                    number += 1
                    yield number, _row({**values, **{name: found[i] for name, found in arrays.items()}})
    except (MemoryError, ConfigError):
        raise  # errors of values or of pyarrow, too
    except arrow_errors() as error:
        raise ConfigError(f"{path}: row {number + 1}: {str(error)[:MAX_ERROR_CHARS]}") from error


def count_rows(path: Path) -> int:
    """Return how many rows a file has. Raises as `read_rows`."""
    load_pyarrow()
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(path).num_rows)
    except MemoryError:
        raise
    except arrow_errors() as error:
        raise ConfigError(f"{path}: {str(error)[:MAX_ERROR_CHARS]}") from error


def _check_lists(path: Path, schema: Any) -> None:
    """Raise `ConfigError` where a column of tokens holds no lists."""
    types = load_pyarrow().types
    for field in schema:
        kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_null)
        if field.name in _TOKENS and not any(fits(field.type) for fits in kinds):
            kind = str(field.type)[:100]
            raise ConfigError(f"{path}: column {field.name} holds values of type {kind}; a list of numbers is needed")


def _row(values: dict[str, Any]) -> RolloutRow | SchemaError:
    bad = next((value for value in values.values() if isinstance(value, SchemaError)), None)
    if bad is not None:
        return bad
    try:
        return msgspec.convert(values, RolloutRow)
    except msgspec.ValidationError as error:
        return SchemaError(str(error)[:MAX_ERROR_CHARS])


def _arrays(column: Any, name: str) -> list[Any]:
    """Return a column of lists as arrays, without a Python object a token, or why a list is none."""
    dtype = _TOKENS[name]
    found: list[Any] = []
    for i in range(len(column)):
        part = column[i]
        if not part.is_valid:
            found.append(None)
            continue
        values = part.values.to_numpy(zero_copy_only=False)
        try:
            found.append(exact_array(values.view(np.int8) if values.dtype == bool else values, dtype))
        except SchemaError as error:
            found.append(SchemaError(f"{name}: {error}"))
    return found


def _batch(pa: Any, schema: Any, rows: Sequence[RolloutRow]) -> Any:
    plain = {name: [msgspec.to_builtins(getattr(row, name), builtin_types=(bytes,)) for row in rows]
             for name in schema.names if name not in _TOKENS}  # fmt: skip
    arrays = {name: pa.array(values, schema.field(name).type) for name, values in plain.items()}
    for name, kind in _TOKENS.items():
        arrays[name] = _lists(pa, [getattr(row, name) for row in rows], kind)
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _lists(pa: Any, values: Sequence[Any], kind: str) -> Any:
    """Return arrays, None among them, as a column of lists."""
    present = [value for value in values if value is not None]
    offsets = np.concatenate([[0], np.cumsum([0 if value is None else len(value) for value in values])])
    flat = np.concatenate(present) if present else np.zeros(0, kind)
    absent = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat, kind), mask=absent)


def arrow_schema() -> Any:
    """Return the schema of all columns, as pyarrow has it.

    A reader of JSON lines needs it where columns are null. Raises `StartupError` where pyarrow is not installed.
    """
    pa = load_pyarrow()
    text, int32, int64, real = pa.string(), pa.int32(), pa.int64(), pa.float64()

    def struct(**fields: Any) -> Any:
        return pa.struct(list(fields.items()))

    call = struct(name=text, arguments=text, id=text)
    said = struct(role=text, content=text, name=text, tool_calls=pa.list_(call), tool_call_id=text,
                  attachments=pa.list_(int32))  # fmt: skip
    kinds = {
        **dict.fromkeys(("epoch", "counter", "started_ns", "seq", "stored_ns", "length", "n_valid", "batch"), int64),
        **dict.fromkeys(("sequences", "sequence", "sample"), int32),
        **dict.fromkeys(
            ("difficulty", "score", "reward", "advantage", "success", "disagreement_mean", "disagreement_max",
             "reward_mean", "reward_std", "reward_range", "batch_advantage", "shaping", "shaping_scale"), real,
        ),
        **{name: pa.list_(pa.type_for_alias(kind)) for name, kind in _TOKENS.items()},
        "policy_versions": pa.list_(text),
        "version_spans": pa.list_(struct(start=int32, version=int32)),
        "columns": pa.list_(struct(name=text, dtype=text, width=int32, data=pa.binary())),
        "environment_rewards": pa.list_(struct(name=text, value=real)),
        "turn_rewards": pa.list_(real),
        "turn_order": pa.list_(int32),
        "turn_parents": pa.list_(int32),
        "turn_advantages": pa.list_(real),
        "excluded": pa.bool_(),
        "dispatch": struct(index=int64, snapshot_id=text, probability=real),
        "messages": pa.list_(said),
        "attachments": pa.list_(struct(mime=text, data=pa.binary())),
        "ratings": pa.list_(struct(rater=text, rating=real, status=text)),
        "raters": pa.list_(struct(rater=text, version=text)),
        "stamps": pa.list_(struct(stage=text, stored_ns=int64, start_ns=int64, end_ns=int64, attempt=int64)),
    }  # fmt: skip
    return pa.schema([(name, kinds.get(name, text)) for name in RolloutRow.__struct_fields__])


def load_pyarrow() -> Any:
    """Return the module pyarrow. Raises `StartupError` where it is not installed."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise StartupError(f"Parquet needs pyarrow: {install_command('export')}, or use JSON lines") from error
    return pa
