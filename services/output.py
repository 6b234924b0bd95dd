"""Printing: tables that fit a terminal and are plain, uncut lines without one."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lachesis.pipeline.common.safe_text import printable, printable_lines

__all__ = [
    "SafeConsole",
    "human_bytes",
    "human_number",
    "human_seconds",
    "json_text",
    "print_json",
    "print_rendered",
    "print_table",
    "printable",
]

_PLAIN_WIDTH = 10_000
"""Characters a line where no terminal limits them."""
_ROUND_UP_AT = 999.5
"""From here on three digits would need an exponent."""
_SHORT_CHARS = 16
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
        table.add_column(name, overflow="fold", no_wrap=longest <= _SHORT_CHARS or not sys.stdout.isatty())
    for row in cells:
        table.add_row(*row)
    print_rendered(lambda _: table)


def print_rendered(picture: Callable[[int], RenderableType]) -> None:
    """Print the result of `picture` for the terminal's width, without trailing blanks."""
    console = SafeConsole(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    with console.capture() as captured:
        console.print(picture(console.width))
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


class SafeConsole(Console):
    """A rich console that takes text for text: markup means nothing, and control characters are spelled out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text
            is_safe = segment.control or text.isprintable()
            yield segment if is_safe else Segment(printable_lines(text), segment.style)


def _text(cell: Any) -> str:
    return "-" if cell is None else printable(str(cell))


def print_json(value: Any) -> None:
    """Print any msgspec-encodable value as indented JSON."""
    sys.stdout.write(_safe_json(msgspec.json.format(msgspec.json.encode(value)).decode()) + "\n")


def json_text(value: Any) -> str:
    """Return any msgspec-encodable value as JSON in one line, without its end."""
    return _safe_json(msgspec.json.encode(value).decode())


def _safe_json(text: str) -> str:
    """Return the same JSON with escapes for characters that a terminal may obey or that standard output lacks.

    They can be in strings alone.
    """
    lacks = not text.isascii() and not _can_be_printed(text)
    if text.isprintable() and not lacks:
        return text
    return "".join(
        char if char == "\n" or (char.isprintable() and (char.isascii() or not lacks)) else json.dumps(char)[1:-1]
        for char in text
    )


def _can_be_printed(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
    return f"{value:.0f}" if abs(value) >= _ROUND_UP_AT else f"{value:.3g}"


def human_seconds(value: float | None) -> str | None:
    """Return a duration with three digits and a unit; None stays None."""
    if value is None:
        return None
    factor, unit = (1.0, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
    return f"{human_number(value * factor)} {unit}"
