"""The page: sections put into the template, figures as data for page.js to draw. Everything is in the one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsesam import __version__
from sparsesam.lab.report.colors import COLORS
from sparsesam.lab.report.downsample import downsampled, points_per_curve
from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import plural
from sparsesam.lab.report.read_run import Run
from sparsesam.lab.report.section import ReportData, Section, Table


def render(title: str, made: str, sections: Sequence[Section], material: ReportData) -> str:
    """The whole page as HTML; ``made`` says when and by what command."""
    environment = Environment(
        loader=PackageLoader("sparsesam.lab.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["table"] = lambda block: isinstance(block, Table)
    figures = [block for section in sections for block in section.blocks if isinstance(block, Figure)]
    limit = points_per_curve(figures)
    unfinished = [run for run in material.runs if run.status in ("failed", "unfinished")]
    return environment.get_template("page.html").render(
        title=title,
        made=made,
        version=__version__,
        count=count(material.runs),
        sections=[section for section in sections if section.blocks],
        missing=[section for section in sections if not section.blocks],
        unfinished=unfinished,
        problems=_problems(material),
        downsampled=_thinned(figures, limit),
        colors=COLORS,
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        plotly=Markup(_plotly()),
        data=Markup(_json(figures, limit)),
    )


def count(found: Sequence[Run]) -> str:
    runs = [run for run in found if run.status != "analyses only"]
    parts = [
        f"{those} {status}"
        for status in ("finished", "failed", "unfinished")
        if (those := sum(run.status == status for run in runs))
    ]
    return f"{plural(len(runs), 'run')}: {', '.join(parts)}" if runs else "no runs, analyses only"


def _problems(material: ReportData) -> list[tuple[str, str]]:
    return [(str(run.path), problem) for run in material.runs for problem in run.problems] + material.problems


def _thinned(figures: Sequence[Figure], limit: int) -> int | None:
    """How many points a curve was cut to, None if none was."""
    lengths = [len(one.x) for figure in figures for panel in figure.panels.values() for one in panel if one.z is None]
    return limit if max(lengths, default=0) > limit else None


# ---- figures as data -------------------------------------------------------------------------------------------


def _json(figures: Sequence[Figure], limit: int) -> str:
    """For a script element: within it only `<` could end it."""
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
        "x": _axis(figure.x),
        "y": _axis(figure.y),
        "z": None if figure.z is None else _axis(figure.z),
        "range_z": figure.range_z,
        # A surface and its contours are the same numbers, written once.
        "panels_of": twin,
        "panels": [] if twin else panels,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    return {"title": axis.title, "log": axis.log}


def _series(series: Series) -> dict[str, Any]:
    return {
        "name": series.name,
        "color": series.color,
        "number": series.number,
        "faint": series.faint,
        "x": _rounded(series.x),
        "y": _rounded(series.y),
        "error": None if series.error is None else _rounded(series.error),
        "z": None if series.z is None else [_rounded(line) for line in series.z],
    }


def _rounded(values: Sequence[Any]) -> list[Any]:
    """Six digits: more than any eye can tell."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in values]


def _asset(name: str) -> str:
    return (resources.files("sparsesam.lab.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise ImportError("the report draws with plotly: pip install 'sparsesam[report]'") from error
