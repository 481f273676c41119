"""Draws figures to PNG, SVG and PDF files with matplotlib."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from sparsesam.integrations.extras import required_by
from sparsesam.lab.display.figure import COLORS, Figure, Series

PLOT_FORMATS = (".png", ".svg", ".pdf")

#: A matplotlib object; matplotlib is imported only when something is drawn.
Canvas = Any

_MARKERS = "oDs^vPX*ph"
_DASHES = ("-", "--", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)))
_WIDTH, _HEIGHT = 5.2, 3.6  # of one panel without its legend, in inches
_STYLE = {
    "svg.hashsalt": "sparsesam",  # makes files reproducible
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def check_plot(file: Path, name: str = "--plot") -> None:
    """Raise before anything is measured if ``file``, the value of the option ``name``, cannot be drawn."""
    if file.suffix.lower() not in PLOT_FORMATS:
        raise ValueError(f"{name} must end in {', '.join(PLOT_FORMATS)}, got {str(file)!r}")
    make_parent(name, file)
    _import_matplotlib()


def make_parent(name: str, file: Path) -> None:
    """Make the directory of ``file``, the value of the argument ``name``; ValueError if it cannot be written."""
    if file.is_dir():
        raise ValueError(f"{name} must be a file, got the directory {str(file)!r}; add a file name")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(file.parent, os.W_OK) else "permission denied"
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
    if reason:
        raise ValueError(f"{name} {str(file)!r} cannot be written ({reason}); choose a directory you can write to")


def write_images(images: Sequence[Tensor], titles: Sequence[str], file: Path, *, columns: int) -> None:
    """Draw (c, h, w) uint8 images with 1 or 3 channels row by row; titles are above the first len(titles) images."""
    rows = -(-len(images) // columns)
    with _new_drawing(1.5 * columns, 1.6 * rows, file) as drawing:
        grid = drawing.subplots(rows, columns, squeeze=False).flat
        for place, axes in enumerate(grid):
            axes.set_axis_off()
            axes.set_title("".join(titles[place : place + 1]), fontsize="small")
            for image in images[place : place + 1]:
                axes.imshow(image.expand(3, -1, -1).permute(1, 2, 0).cpu().numpy(), interpolation="nearest")


def write_plot(figures: Sequence[Figure], *files: Path) -> Canvas:
    """Write one image with a row for each figure that has content, its panels side by side."""
    shown = [figure for figure in figures if figure.has_content]
    names = [{series.name for series in figure.series} for figure in shown]
    heights = [_HEIGHT + 0.1 * len(every) / len(figure.panels) for figure, every in zip(shown, names, strict=True)]
    width = _WIDTH * max((len(figure.panels) for figure in shown), default=1)
    with _new_drawing(width, sum(heights) or _HEIGHT, *files) as drawing:
        rows = drawing.subfigures(len(shown) or 1, 1, squeeze=False, height_ratios=heights or None).flat
        for row, figure, every in zip(rows, shown, names, strict=False):
            projection = "3d" if figure.kind == "surface" else None
            for place, (name, panel) in enumerate(figure.panels.items(), start=1):
                axes = row.add_subplot(1, len(figure.panels), place, projection=projection)
                _draw_panel(axes, figure, panel)
                axes.set_title(": ".join(filter(None, (figure.title, name))), fontsize="medium", wrap=True)
            if figure.z is None and len(every) > 1:  # the panels share a legend
                labeled = [axes.get_legend_handles_labels() for axes in row.axes]
                handles = {name: handle for pairs in labeled for handle, name in zip(*pairs, strict=True)}
                look = {"loc": "outside lower center", "ncols": 2 * len(figure.panels), "fontsize": "small"}
                row.legend(handles.values(), handles, **look)
    return drawing


def _import_matplotlib() -> Any:
    with required_by("a drawing", "'sparsesam[report]'"):
        import matplotlib.figure  # not pyplot, which may open windows
    return matplotlib


@contextmanager
def _new_drawing(width: float, height: float, *files: Path) -> Iterator[Canvas]:
    """Yield a matplotlib figure and save it to the files after the block."""
    matplotlib = _import_matplotlib()
    with matplotlib.rc_context(_STYLE):
        drawing = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
        yield drawing
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix.lower())
            drawing.savefig(file, dpi=150, metadata=undated, bbox_inches="tight", pad_inches=0.08)


def _draw_panel(axes: Canvas, figure: Figure, panel: Sequence[Series]) -> None:
    axes.set(xlabel=figure.x.title, ylabel=figure.y.title)
    if figure.kind == "bars":
        _draw_bars(axes, panel)
    elif figure.z is None:
        _draw_curves(axes, figure, panel)
    else:
        _draw_grid(axes, figure, figure.z.title, *panel)
    for name, axis in (("x", figure.x), ("y", figure.y)):
        if axis.log:
            axes.set(**{f"{name}scale": "log"})
            low, high = getattr(axes, f"get_{name}lim")()
            if high < 30 * low:  # one or two powers of ten are too few labels
                shown = getattr(axes, f"{name}axis")
                shown.set_major_locator(_import_matplotlib().ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
                shown.set_major_formatter("{x:g}")
                shown.minorticks_off()
        if axis.whole:
            axes.locator_params(axis=name, integer=True)


def _draw_curves(axes: Canvas, figure: Figure, panel: Sequence[Series]) -> None:
    """Draw lines with bands, or points with error bars; faint series are always lines."""
    for series in panel:
        x, y, color = _floats(series.x) + series.shift, _floats(series.y), COLORS[series.color][0]
        ends = None if series.bars is None else _floats([bar or (np.nan, np.nan) for bar in series.bars]).T
        is_line = figure.kind == "lines" or series.faint
        looks = len(_DASHES) if is_line else 2  # of the variants of a method, before they become fainter
        label = f"{series.name} (best choice)" if series.chosen else series.name
        style = {"color": color, "label": label, "alpha": max(0.4, 1 - 0.3 * (series.variant // looks))}
        if is_line:
            axes.plot(x, y, linestyle=":" if series.faint else _DASHES[series.variant % looks], linewidth=1.2, **style)
            if ends is not None and not figure.has_many_bands:
                axes.fill_between(x, *ends, color=color, alpha=0.15, linewidth=0)
            continue
        bars = None if ends is None else np.nan_to_num(np.abs(ends - y))
        marker, size = (_MARKERS[series.marker % len(_MARKERS)], 6) if len(x) < 50 else ("o", 3)
        fill = "none" if series.variant % 2 else color
        axes.errorbar(x, y, yerr=bars, fmt=marker, markersize=size, markerfacecolor=fill, capsize=2, **style)
        if series.chosen:
            axes.plot(x, y, "o", markersize=13, markerfacecolor="none", markeredgecolor=color)
            axes.margins(0.12, 0.15)  # room for the ring


def _draw_bars(axes: Canvas, panel: Sequence[Series]) -> None:
    width = 0.8 / len(panel)
    for place, series in enumerate(panel):
        places = np.arange(len(series.x)) + (place - (len(panel) - 1) / 2) * width
        opacity = max(0.3, 1 - 0.3 * series.variant) * (0.5 if series.faint else 1.0)
        axes.bar(places, _floats(series.y), width, color=COLORS[series.color][0], alpha=opacity, label=series.name)
    _name_ticks(axes.set_xticks, panel[0].x, rotation=60, ha="right", rotation_mode="anchor")


def _draw_grid(axes: Canvas, figure: Figure, title: str, series: Series) -> None:
    z = np.ma.masked_invalid(_floats(series.z or ()))
    low, high = figure.range_z or (z.min(), z.max())
    if figure.kind == "heatmap":
        axes.grid(False)
        drawn = axes.imshow(z, aspect="auto", vmin=low, vmax=high, interpolation="nearest")
        _name_ticks(axes.set_xticks, series.x, rotation=60)
        _name_ticks(axes.set_yticks, series.y)
        axes.figure.colorbar(drawn, ax=axes, label=title)
        return
    axes.locator_params(nbins=5)
    if figure.kind == "contour":
        drawn = axes.contourf(series.x, series.y, z, levels=np.linspace(low, high, 25) if high > low else 24)
        axes.set_aspect("equal")
        axes.figure.colorbar(drawn, ax=axes, label=title, format="%.3g")
        return
    x, y = np.meshgrid(series.x, series.y)
    axes.plot_surface(x, y, z.filled(np.nan), vmin=low, vmax=high, cmap="viridis", rcount=60, ccount=60)
    axes.set(zlim=(low, high), zlabel=title)
    axes.set_box_aspect(None, zoom=0.85)  # keeps the labels inside the image
    axes.tick_params(labelsize="small", pad=0)


def _name_ticks(change: Callable[..., Any], values: Sequence[Any], **style: Any) -> None:
    """Label at most 40 ticks, evenly spaced."""
    places = range(0, len(values), -(-len(values) // 40))
    change(places, [str(values[place]) for place in places], fontsize="x-small", **style)


def _floats(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)
