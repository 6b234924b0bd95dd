"""Rows as JSON lines: one object a line, every column on each of them. Bytes are base64 text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from lachesis.pipeline.offline.archive.logic.exact_array import exact_array
from lachesis.pipeline.offline.archive.logic.row import RolloutRow
from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE
from lachesis.schemas.errors import SchemaError

__all__ = ["MAX_LINE_BYTES", "JsonLinesWriter", "Line", "read_lines", "read_row"]

MAX_LINE_BYTES = 256 << 20
"""A file with a longer line is taken for one of another kind."""


class JsonLinesWriter:
    """Writes rows to a file that is open for that."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[RolloutRow]) -> None:
        for row in rows:
            self._file.write(_encoder.encode(row) + b"\n")

    def close(self) -> None:
        """Everything is written already."""

    def abandon(self) -> None:
        """Nothing is held."""


class Line(NamedTuple):
    """A line as read: `number` from 1, `end` the place in the file behind it."""

    number: int
    data: bytes
    end: int


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are not blank. Raises `OSError`, and `SchemaError` on one that has no end."""
    end = 0
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number, end = number + 1, end + len(data)
            if len(data) > MAX_LINE_BYTES:
                raise SchemaError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes: this is no file of JSON lines")
            if data := data.strip():
                yield Line(number, data, end)


def read_row(data: bytes) -> RolloutRow:
    """Return the row in a line. Raises `SchemaError`."""
    try:
        return _decoder.decode(data)
    except (*UNREADABLE, ValueError, TypeError) as error:  # the last two are of an array
        raise SchemaError(str(error)[:MAX_ERROR_CHARS]) from error


def _array(kind: Any, value: Any) -> Any:
    """Return a list as the array that a column asks for; what does not fit into its type exactly is refused."""
    return exact_array(value, kind.__args__[1].__args__[0])


_encoder = msgspec.json.Encoder(enc_hook=lambda array: array.tolist())
_decoder = msgspec.json.Decoder(RolloutRow, dec_hook=_array)
