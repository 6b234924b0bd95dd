"""Tables that leave out columns if the terminal is too narrow, instead of cutting figures."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from lachesis.services.output import print_rendered

__all__ = ["FULL_DETAIL", "TableColumn", "fitting", "print_columns", "table"]

_GAP = 2
FULL_DETAIL = 3
"""The highest level of detail; the lowest is 0."""


class TableColumn(NamedTuple):
    """A column, shown at the levels of detail from `least` to `most`."""

    name: str
    cells: Sequence[Text]
    right: bool = False
    least: int = 0
    most: int = FULL_DETAIL

    @property
    def width(self) -> int:
        return max([len(self.name), *(cell.cell_len for cell in self.cells)])


def fitting(columns: Sequence[TableColumn], width: int) -> list[TableColumn]:
    """Return the columns of the highest level of detail that fits into `width` characters.

    If none fits, the lowest level.
    """
    for detail in range(FULL_DETAIL, 0, -1):
        shown = [column for column in columns if column.least <= detail <= column.most]
        if sum(column.width + _GAP for column in shown) - _GAP <= width:
            return shown
    return [column for column in columns if column.least == 0]


def print_columns(columns: Sequence[TableColumn]) -> None:
    """Print the columns that fit the terminal, all of them without one."""
    print_rendered(lambda width: table(fitting(columns, width)))


def table(columns: Sequence[TableColumn], styles: Sequence[str] | None = None) -> Table:
    """Return the table of these columns; `styles`: one for each row."""
    found = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        found.add_column(column.name, justify="right" if column.right else "left", no_wrap=True)
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        found.add_row(*cells, style=styles[number] if styles else "")
    return found
