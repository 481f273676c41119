"""Tables and figures as data, and what draws them: the analyses describe, the page and the files draw.

A `Figure` says what is shown. The report's page draws it with plotly, `write_figures` and `write_plot` with matplotlib.
"""

from sparsesam.lab.display.drawing import write_figures, write_plot
from sparsesam.lab.display.figure import Axis, Figure, Series
from sparsesam.lab.display.table import Cell, Table

__all__ = ["Axis", "Cell", "Figure", "Series", "Table", "write_figures", "write_plot"]
