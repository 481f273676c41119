"""Figures as files for a paper: SVG and PDF drawn by matplotlib, and the numbers as CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsesam.lab.report.colors import COLORS
from sparsesam.lab.report.figure import Figure, Series, to_csv

_MARKERS = "oDs^vPX*ph"
_DASHES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))


def write_figures(figures: Sequence[Figure], folder: Path) -> None:
    """NAME.csv with all panels, and NAME.svg and .pdf, or NAME-PANEL where there are several."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures are drawn with matplotlib: pip install 'sparsesam[report]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "sparsesam", "font.size": 9, "axes.grid": True, "grid.alpha": 0.25})
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        (folder / f"{figure.name}.csv").write_text(to_csv(figure), encoding="utf-8", errors="replace", newline="")
        for number, (name, panel) in enumerate(figure.panels.items()):
            words = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
            end = f"-{number + 1}-{words}"[:80] if len(figure.panels) > 1 else ""
            _write(figure, name, panel, folder / f"{figure.name}{end}")


def _write(figure: Figure, panel: str, series: Sequence[Series], path: Path) -> None:
    from matplotlib import pyplot

    is_surface = figure.kind == "surface"
    drawing, axis = pyplot.subplots(figsize=(5, 3.6), subplot_kw={"projection": "3d"} if is_surface else {})
    draw: Any = {"lines": _lines, "points": _points, "bars": _bars}.get(figure.kind, _grid)
    for place, one in enumerate(series):
        draw(axis, figure, one, place, len(series))
    axis.set_xlabel(_literal(figure.x.title))
    axis.set_ylabel(_literal(figure.y.title))
    if figure.x.log:
        axis.set_xscale("log")
    if figure.y.log:
        axis.set_yscale("log")
    if panel:
        axis.set_title(_literal(panel), fontsize=9)
    if len(series) > 1:
        axis.legend(fontsize=7)
    drawing.tight_layout()
    for kind in ("svg", "pdf"):
        dateless = {"Date": None} if kind == "svg" else {"CreationDate": None}
        drawing.savefig(path.with_name(f"{path.name}.{kind}"), metadata=dateless)
    pyplot.close(drawing)


def _lines(axis: Any, figure: Figure, series: Series, place: int, count: int) -> None:
    color = COLORS[series.color][0]
    style = ":" if series.faint else _DASHES[series.number % len(_DASHES)]
    y = _floats(series.y)
    axis.plot(_floats(series.x), y, color=color, linestyle=style, linewidth=1.2, label=_literal(series.name))
    if series.error is not None:
        errors = [(a - e, a + e) for a, e in zip(y, _floats(series.error), strict=True)]
        low, high = zip(*errors, strict=True)
        axis.fill_between(_floats(series.x), low, high, color=color, alpha=0.15, linewidth=0)


def _points(axis: Any, figure: Figure, series: Series, place: int, count: int) -> None:
    if series.faint:
        _lines(axis, figure, series, place, count)
        return
    axis.errorbar(
        _floats(series.x),
        _floats(series.y),
        yerr=None if series.error is None else _floats(series.error),
        fmt=_MARKERS[series.number % len(_MARKERS)],
        markersize=3 if len(series.x) > 50 else 6,
        color=COLORS[series.color][0],
        capsize=2,
        label=_literal(series.name),
    )


def _bars(axis: Any, figure: Figure, series: Series, place: int, count: int) -> None:
    width = 0.8 / count
    places = [number + (place - (count - 1) / 2) * width for number in range(len(series.x))]
    fill = {"alpha": 0.5} if series.faint else {}
    axis.bar(places, _floats(series.y), width, color=COLORS[series.color][0], label=_literal(series.name), **fill)
    axis.set_xticks(range(len(series.x)), [_literal(str(one)) for one in series.x], rotation=60, ha="right", fontsize=6)


def _grid(axis: Any, figure: Figure, series: Series, place: int, count: int) -> None:
    import numpy as np

    low, high = figure.range_z or (None, None)
    z = np.array([_floats(line) for line in series.z or ()])
    label = _literal(figure.z.title) if figure.z else ""
    if figure.kind == "heatmap":
        drawn = axis.imshow(z, aspect="auto", vmin=low, vmax=high, cmap="viridis")
        axis.set_xticks(range(len(series.x)), [_literal(str(one)) for one in series.x], rotation=60, fontsize=6)
        axis.set_yticks(range(len(series.y)), [_literal(str(one)) for one in series.y], fontsize=6)
        axis.grid(False)
        axis.figure.colorbar(drawn, label=label)
        return
    x, y = np.meshgrid(_floats(series.x), _floats(series.y))
    if figure.kind == "surface":
        axis.plot_surface(x, y, z, vmin=low, vmax=high, cmap="viridis", linewidth=0)
        axis.set_zlim(low, high)
        axis.set_zlabel(label)
        return
    levels = np.linspace(low, high, 24) if low is not None and high is not None and high > low else 24
    drawn = axis.contourf(x, y, z, levels=levels, cmap="viridis")
    axis.figure.colorbar(drawn, label=label)


def _floats(values: Sequence[Any]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _literal(text: str) -> str:
    """Matplotlib takes what stands between two dollar signs for mathematics."""
    return text.replace("$", r"\$")
