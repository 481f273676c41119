"""Tables as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsesam.lab.display.numbers import Number, significant

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Cell:
    """``order`` is the sort key in its column, the text itself if None. ``status`` sets its color.

    On the page, a click on the text shows the ``details``.
    """

    text: str
    order: float | None = None
    status: str = ""
    details: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def has_content(self) -> bool:
        return bool(self.rows)

    @property
    def number_columns(self) -> list[str]:
        """The columns that are sorted by numbers; all others hold text."""
        columns = zip(self.columns, *self.rows, strict=True)
        return [name for name, *cells in columns if any(cell.order is not None for cell in cells)]


def cells(*values: str | Number | Cell) -> list[Cell]:
    """Returns a cell for each value; numbers are formatted and sorted as numbers."""
    made = [Cell(value) if isinstance(value, str) else value for value in values]
    return [value if isinstance(value, Cell) else number_cell(value) for value in made]


def number_cell(value: Number, show: Callable[[Number], str] = significant) -> Cell:
    """Returns a cell that sorts by its number; missing numbers come last."""
    return Cell(show(value), order=value)


def table_of_rows(
    name: str, caption: str, heading: str, rows: Mapping[str, Mapping[str, Cell | str | Number]]
) -> Table:
    """Returns a table with a row for each label, in the column ``heading``."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    filled = [cells(label, *(row.get(column) for column in columns)) for label, row in rows.items()]
    return Table(name, caption, [heading, *columns], filled)


def to_rich(table: Table, title: str, *, transposed: bool = False) -> RichTable:
    """Convert the table for a terminal; ``transposed`` shows rows as columns."""
    from rich.markup import escape  # names may have brackets
    from rich.table import Table as RichTable

    lines = [["", *table.columns[1:]], *([cell.text for cell in row] for row in table.rows)]
    headings, *rows = zip(*lines, strict=True) if transposed else lines
    drawn = RichTable(title=escape(title), caption=escape(table.caption) or None)
    for place, heading in enumerate(headings):
        drawn.add_column(escape(heading), justify="right" if place else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(escape, row))
    return drawn
