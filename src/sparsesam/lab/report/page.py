"""The page: the sections in the template, the figures as data that page.js draws. Everything is in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sparsesam import __version__
from sparsesam.lab.display.colors import COLORS
from sparsesam.lab.display.figure import Figure, Series
from sparsesam.lab.display.table import Table
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.downsample import downsampled, points_per_curve
from sparsesam.lab.report.layout import missing_analyses
from sparsesam.lab.report.section import Section


def render(title: str, made: str, sections: Sequence[Section], data: ReportData) -> str:
    """The whole page as HTML; ``made`` says when and by which command."""
    environment = Environment(
        loader=PackageLoader("sparsesam.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.tests["table"] = lambda block: isinstance(block, Table)
    figures = [figure for section in sections for figure in section.figures]
    limit = points_per_curve(figures)
    return environment.get_template("page.html").render(
        title=title,
        made=made,
        version=__version__,
        count=data.count(),
        sections=sections,
        missing=missing_analyses(data),
        problems=_problems(data),
        downsampled=_downsampled_to(figures, limit),
        colors=COLORS,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        plotly=Markup(_plotly()),
        data=Markup(_json(figures, limit)),
    )


def _breakable(text: str) -> Markup:
    """Long paths may break after a slash; nothing breaks within a word, such as a hash."""
    return Markup(str(escape(text)).replace("/", "/<wbr>"))


def _problems(data: ReportData) -> list[tuple[str, str]]:
    return [(str(run.path), problem) for run in data.runs for problem in run.problems] + data.problems


def _downsampled_to(figures: Sequence[Figure], limit: int) -> int | None:
    """The number of points of the longest curves, None if all are complete."""
    lengths = [len(one.x) for figure in figures for panel in figure.panels.values() for one in panel if one.z is None]
    return limit if max(lengths, default=0) > limit else None


# ---- figures as data -------------------------------------------------------------------------------------------


def _json(figures: Sequence[Figure], limit: int) -> str:
    """For a script element, which only `<` could end."""
    drawn: list[dict[str, Any]] = []
    for place, figure in enumerate(figures):
        twin = next((one.name for one in figures[:place] if one.panels is figure.panels), None)
        drawn.append(_figure(figure, limit, twin))
    return json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _figure(figure: Figure, limit: int, twin: str | None) -> dict[str, Any]:
    panels = [
        {"name": name, "series": [_series(downsampled(one, limit)) for one in panel]}
        for name, panel in figure.panels.items()
    ]
    return {
        "name": figure.name,
        "title": figure.title,
        "kind": figure.kind,
        "x": asdict(figure.x),
        "y": asdict(figure.y),
        "z": figure.z and asdict(figure.z),
        "range_z": figure.range_z,
        # A surface and its contours are the same numbers, written once.
        "panels_of": twin,
        "panels": [] if twin else panels,
    }


def _series(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "color": series.color,
        "number": series.number,
        "faint": series.faint,
        "mark": series.mark,
        "x": _rounded(series.x),
        "y": _rounded(series.y),
        "bars": None if series.bars is None else [bar and _rounded(bar) for bar in series.bars],
        "z": None if series.z is None else [_rounded(line) for line in series.z],
    }


def _rounded(values: Sequence[Any]) -> list[Any]:
    """Six significant digits, more than a chart can show."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def _asset(name: str) -> str:
    return (resources.files("sparsesam.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ImportError("the report draws with plotly: pip install 'sparsesam[report]'") from error
