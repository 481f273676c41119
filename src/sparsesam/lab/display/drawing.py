"""Figures as files, drawn by matplotlib: PNG, SVG and PDF, and their numbers as CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsesam.integrations.extras import required_by
from sparsesam.lab.display.colors import COLORS, PALETTE_SIZE
from sparsesam.lab.display.figure import Axis, Figure, Series, to_csv

FORMATS = (".png", ".svg", ".pdf")

#: A matplotlib object. It is imported only when something is drawn.
Canvas = Any

_MARKERS = "oDs^vPX*ph"
_DASHES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
_WIDTH, _HEIGHT = 5.2, 3.6  # inches, of one panel without its legend
_GRID_HEIGHT = 4.2
_STYLE = {
    "svg.hashsalt": "sparsesam",  # the same figure gives the same file
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def check_plot(file: Path) -> None:
    """Raise before anything is measured if ``file`` cannot be drawn."""
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"plot must end in {', '.join(FORMATS)}, got {str(file)!r}")
    _import_matplotlib()


def write_plot(figures: Sequence[Figure], file: Path) -> None:
    """One picture of several figures, as `draw_plot` arranges them."""
    matplotlib = _import_matplotlib()
    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_STYLE):
        _save(draw_plot(figures), file)


def draw_plot(figures: Sequence[Figure]) -> Canvas:
    """A matplotlib figure with a row for each figure that has content, its panels side by side."""
    shown = [figure for figure in figures if figure.has_content]
    heights = [_height(figure) for figure in shown]
    width = _WIDTH * max((len(figure.panels) for figure in shown), default=1)
    drawing = _new_drawing(width, sum(heights) or _HEIGHT)
    rows = drawing.subfigures(max(len(shown), 1), 1, squeeze=False, height_ratios=heights or [1]).flat
    for row, figure in zip(rows, shown, strict=False):
        parts = row.subfigures(1, len(figure.panels), squeeze=False).flat
        for part, (name, panel) in zip(parts, figure.panels.items(), strict=True):
            title = f"{figure.title}: {name}" if name else figure.title
            _draw_panel(part, figure, title, panel, width / len(figure.panels))
    return drawing


def write_figures(figures: Sequence[Figure], folder: Path) -> None:
    """For each figure NAME.csv, NAME.svg and NAME.pdf; where it has several panels, NAME-PANEL.svg and .pdf."""
    matplotlib = _import_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    for figure in figures:
        (folder / f"{figure.name}.csv").write_text(to_csv(figure), encoding="utf-8", errors="replace", newline="")
        for number, (name, panel) in enumerate(figure.panels.items()):
            words = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")
            end = f"-{number + 1}-{words}"[:80] if len(figure.panels) > 1 else ""
            with matplotlib.rc_context(_STYLE):
                drawing = _new_drawing(_WIDTH, _height(figure))
                _draw_panel(drawing, figure, name, panel, _WIDTH)
                for suffix in (".svg", ".pdf"):
                    _save(drawing, folder / f"{figure.name}{end}{suffix}")


def write_images(images: Sequence[Tensor], titles: Sequence[str], file: Path, *, columns: int) -> None:
    """Images, (c, h, w) uint8 with c being 1 or 3, row by row, with titles above the first of them."""
    _import_matplotlib()
    rows = -(-len(images) // columns)
    drawing = _new_drawing(1.5 * columns, 1.6 * rows)
    grid = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes in grid:
        axes.set_axis_off()
    for axes, title in zip(grid, titles, strict=False):
        axes.set_title(_literal(title), fontsize="small")
    for axes, image in zip(grid, images, strict=False):
        axes.imshow(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy(), interpolation="nearest")
    file.parent.mkdir(parents=True, exist_ok=True)
    _save(drawing, file)


def _import_matplotlib() -> Any:
    with required_by("a drawing", "'sparsesam[report]'"):
        import matplotlib
    return matplotlib


def _new_drawing(width: float, height: float) -> Canvas:
    from matplotlib.figure import Figure as Drawing  # without pyplot, so that no window is ever opened

    return Drawing(figsize=(width, height), layout="constrained")


def _save(drawing: Canvas, file: Path) -> None:
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix.lower())
    drawing.savefig(file, dpi=150, metadata=undated, bbox_inches="tight", pad_inches=0.08)


def _height(figure: Figure) -> float:
    names = [series.name for series in max(figure.panels.values(), key=len, default=[])]
    legend = 0.2 * -(-len(names) // _legend_columns(names)) if _has_legend(figure, names) else 0.0
    return (_HEIGHT if figure.kind in ("lines", "points", "bars") else _GRID_HEIGHT) + legend


def _has_legend(figure: Figure, names: Sequence[str]) -> bool:
    return figure.kind in ("lines", "points", "bars") and len(names) > 1


def _legend_columns(names: Sequence[str], width: float = _WIDTH) -> int:
    """As many as fit below a panel; a character of the legend is about 0.062 inches wide, a swatch and gaps 0.6."""
    longest = max((len(name) for name in names), default=1)
    return max(1, min(len(names), int(width / (0.6 + 0.062 * longest))))


# ---- one panel ---------------------------------------------------------------------------------------------------


def _draw_panel(canvas: Canvas, figure: Figure, title: str, panel: Sequence[Series], width: float) -> None:
    is_surface = figure.kind == "surface"
    axes = canvas.add_subplot(projection="3d") if is_surface else canvas.add_subplot()
    draw = {"lines": _draw_line, "points": _draw_points, "bars": _draw_bars}.get(figure.kind, _draw_grid)
    for place, series in enumerate(panel):
        draw(axes, figure, series, place, len(panel))
    axes.set_xlabel(_literal(figure.x.title))
    axes.set_ylabel(_literal(figure.y.title))
    if title:
        axes.set_title(_literal(title), fontsize="medium", wrap=True)
    if figure.kind in ("lines", "points"):
        _set_scale(axes.xaxis, axes.set_xscale, figure.x)
    if figure.kind in ("lines", "points", "bars"):
        _set_scale(axes.yaxis, axes.set_yscale, figure.y)
    names = [series.name for series in panel]
    if _has_legend(figure, names):
        canvas.legend(loc="outside lower center", ncols=_legend_columns(names, width), fontsize="small")


def _set_scale(axis: Canvas, change: Any, described: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    if described.log:
        change("log")
    if described.whole:
        axis.set_major_locator(MaxNLocator(integer=True))


def _draw_line(axes: Canvas, figure: Figure, series: Series, place: int, count: int) -> None:
    color = COLORS[series.color][0]
    style = ":" if series.faint else _DASHES[series.number // PALETTE_SIZE % len(_DASHES)]
    x, y = _floats(series.x), _floats(series.y)
    axes.plot(x, y, color=color, linestyle=style, linewidth=1.2, label=_literal(series.name))
    if series.bars is not None:
        low, high = _bar_ends(series.bars)
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)


def _draw_points(axes: Canvas, figure: Figure, series: Series, place: int, count: int) -> None:
    if series.faint:
        _draw_line(axes, figure, series, place, count)
        return
    color, many, y = COLORS[series.color][0], len(series.x) > 50, _floats(series.y)
    axes.errorbar(
        _floats(series.x),
        y,
        yerr=None if series.bars is None else np.nan_to_num(np.abs(_bar_ends(series.bars) - y)),
        fmt="o" if many else _MARKERS[series.number % len(_MARKERS)],
        markersize=3 if many else 6,
        color=color,
        capsize=2,
        label=_literal(series.name),
    )
    if series.mark:
        axes.plot(series.x, series.y, "o", markersize=13, markerfacecolor="none", markeredgecolor=color)
        axes.annotate(_literal(series.mark), (series.x[0], series.y[0]), **_beside(figure, series))
        axes.margins(0.12, 0.15)  # room for the ring


def _beside(figure: Figure, marked: Series) -> dict[str, Any]:
    """Where the word at a marked point goes: towards the middle, so that it stays within the axes."""
    places = [one.x[0] for one in figure.series if len(one.x) == 1]
    sign, align = (1, "left") if 2 * marked.x[0] <= min(places) + max(places) else (-1, "right")
    return {"xytext": (sign * 10, 0), "textcoords": "offset points", "ha": align, "va": "center"}


def _draw_bars(axes: Canvas, figure: Figure, series: Series, place: int, count: int) -> None:
    width = 0.8 / count
    places = [number + (place - (count - 1) / 2) * width for number in range(len(series.x))]
    opacity = 0.5 if series.faint else 1.0
    axes.bar(
        places, _floats(series.y), width, color=COLORS[series.color][0], alpha=opacity, label=_literal(series.name)
    )
    names = [_literal(str(one)) for one in series.x]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize="x-small")


def _draw_grid(axes: Canvas, figure: Figure, series: Series, place: int, count: int) -> None:
    low, high = figure.range_z or (None, None)
    z = np.ma.masked_invalid(np.array([_floats(line) for line in series.z or ()]))
    title = _literal(figure.z.title) if figure.z else ""
    if figure.kind == "heatmap":
        drawn = axes.imshow(z, aspect="auto", vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
        _name_ticks(axes.set_xticks, series.x, rotation=60)
        _name_ticks(axes.set_yticks, series.y)
        axes.grid(False)
        axes.figure.colorbar(drawn, ax=axes, label=title)
        return
    from matplotlib.ticker import MaxNLocator

    x, y = np.meshgrid(_floats(series.x), _floats(series.y))
    if figure.kind == "surface":
        axes.plot_surface(x, y, z.filled(np.nan), vmin=low, vmax=high, cmap="viridis", rcount=60, ccount=60)
        axes.set_zlim(low, high)
        axes.set_zlabel(title)
        axes.set_box_aspect(None, zoom=0.85)  # the labels are within the picture
        axes.locator_params(nbins=5)
        axes.tick_params(labelsize="small", pad=0)
        return
    levels = np.linspace(low, high, 24) if low is not None and high is not None and high > low else 24
    drawn = axes.contourf(x, y, z, levels=levels, cmap="viridis")
    axes.set_aspect("equal")
    axes.grid(False)
    axes.figure.colorbar(drawn, ax=axes, label=title, ticks=MaxNLocator(6))


def _name_ticks(change: Any, values: Sequence[Any], **style: Any) -> None:
    """At most 24 names, evenly chosen."""
    stride = -(-len(values) // 24)
    places = range(0, len(values), max(stride, 1))
    change(places, [_literal(str(values[place])) for place in places], fontsize="x-small", **style)


def _bar_ends(bars: Sequence[tuple[float, float] | None]) -> npt.NDArray[np.float64]:
    """(2, n): low and high ends, NaN where there is no bar."""
    return _floats([bar or (np.nan, np.nan) for bar in bars]).T


def _floats(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def _literal(text: str) -> str:
    """Matplotlib takes what stands between two dollar signs for mathematics."""
    return text.replace("$", r"\$")
