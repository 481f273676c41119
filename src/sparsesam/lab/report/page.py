"""The page: the sections in the template, the figures as data that page.js draws. Everything is in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from sparsesam import __version__
from sparsesam.integrations.extras import required_by
from sparsesam.lab.display import COLORS, Figure, Series, Table
from sparsesam.lab.report.data import ReportData, Section
from sparsesam.lab.report.sections.analyses import missing_analyses

#: Points of all figures together, about 20 bytes each: the page stays well below 10 MB with plotly's 5.
BUDGET = 150_000
_MOST, _FEWEST = 500, 20


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
        problems=[(str(run.path), one) for run in data.runs for one in run.problems] + data.problems,
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


def _downsampled_to(figures: Sequence[Figure], limit: int) -> int | None:
    """The number of points of the longest curves, None if all are complete."""
    lengths = [len(one.x) for figure in figures for one in figure.series if one.z is None]
    return limit if max(lengths, default=0) > limit else None


def points_per_curve(figures: Sequence[Figure]) -> int:
    """The limit at which all figures fit into the budget; surfaces are not downsampled."""
    series = [one for figure in figures for one in figure.series]
    curves = sum(one.z is None for one in series)
    left = BUDGET - sum(len(one.x) * len(one.y) for one in series if one.z is not None)
    return max(_FEWEST, min(_MOST, left // max(curves, 1)))


def downsampled(series: Series, limit: int) -> Series:
    """Every k-th point and the last."""
    if series.z is not None or len(series.x) <= limit:
        return series
    stride = -(-len(series.x) // (limit - 1))
    kept = sorted({*range(0, len(series.x), stride), len(series.x) - 1})
    return replace(
        series,
        x=[series.x[place] for place in kept],
        y=[series.y[place] for place in kept],
        bars=None if series.bars is None else [series.bars[place] for place in kept],
    )


# ---- figures as data -------------------------------------------------------------------------------------------


def _json(figures: Sequence[Figure], limit: int) -> str:
    """For a script element, which only `<` could end."""
    drawn: list[dict[str, Any]] = []
    for place, figure in enumerate(figures):
        twin = next((one.name for one in figures[:place] if one.panels is figure.panels), None)
        drawn.append(_figure(figure, limit, twin))
    return json.dumps(drawn, default=vars, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _figure(figure: Figure, limit: int, twin: str | None) -> dict[str, Any]:
    panels = [
        {"name": name, "series": [_rounded(vars(downsampled(one, limit))) for one in panel]}
        for name, panel in figure.panels.items()
    ]
    # A surface and its contours are the same numbers, written once.
    return {**vars(figure), "panels_of": twin, "panels": [] if twin else panels}


def _rounded(value: Any) -> Any:
    """Numbers with six significant digits, more than a chart can show."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _asset(name: str) -> str:
    return (resources.files("sparsesam.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    with required_by("the report", "'sparsesam[report]'"):
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
