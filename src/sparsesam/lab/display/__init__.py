"""Tables and figures as data, and functions that draw them.

A `Figure` describes what is shown. The report's page draws it with plotly, `write_plot` with matplotlib.
"""

from sparsesam.lab.display.drawing import check_plot, make_parent, write_images, write_plot
from sparsesam.lab.display.figure import Axis, Figure, Series, SeriesStyle, assign_styles, side_by_side
from sparsesam.lab.display.numbers import Number, number, percent, plural, ratio, significant
from sparsesam.lab.display.table import Cell, Table, cells, number_cell, table_of_rows, to_rich

__all__ = [
    "Axis", "Cell", "Figure", "Number", "Series", "SeriesStyle", "Table",
    "assign_styles", "cells", "check_plot", "make_parent", "number", "number_cell", "percent", "plural", "ratio",
    "side_by_side", "significant", "table_of_rows", "to_rich", "write_images", "write_plot",
]  # fmt: skip
