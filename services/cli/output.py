"""Printing: tables that fit a terminal and are plain, uncut lines without one."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["human_bytes", "human_number", "human_seconds", "print_json", "print_rendered", "print_table", "printable"]

_PLAIN_WIDTH = 10_000
"""Characters a line where no terminal limits them."""
_WHOLE = 999.5
"""From here on three digits would need an exponent."""
_SHORT = 16
"""Characters of what is never folded."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows of values; None is shown as a dash, since it means "not known". A `Text` keeps its style.

    Where a terminal is too narrow it is the columns with long texts that are folded.
    """
    cells = [[cell if isinstance(cell, Text) else Text(_text(cell)) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        longest = max([len(name), *(len(row[i]) for row in cells)])
        table.add_column(name, overflow="fold", no_wrap=longest <= _SHORT or not sys.stdout.isatty())
    for row in cells:
        table.add_row(*row)
    print_rendered(lambda _: table)


def print_rendered(picture: Callable[[int], RenderableType]) -> None:
    """Print what `picture` makes for a number of characters a line, without the blanks at the ends of lines."""
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(picture(console.width))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def printable(text: str) -> str:
    """Return the text with control characters spelled out: an event's text is not ours, and may move a cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _text(cell: Any) -> str:
    return "-" if cell is None else printable(str(cell))


def print_json(value: Any) -> None:
    """Print any msgspec-encodable value as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def human_bytes(size: int) -> str:
    """Return a size with a binary unit: 1536 -> `1.5 KiB`."""
    if size < 1024:
        return f"{size} B"
    power = min((size.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.1f} {_UNITS[power]}"


def human_number(value: float | None) -> str | None:
    """Return a number with three digits, or all before its point; None stays None."""
    if value is None:
        return None
    return f"{value:.0f}" if abs(value) >= _WHOLE else f"{value:.3g}"


def human_seconds(value: float | None) -> str | None:
    """Return a duration with three digits and a unit; None stays None."""
    if value is None:
        return None
    factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
    return f"{human_number(value * factor)} {unit}"
