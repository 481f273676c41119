"""Figures as files: complete, without warnings, with the legend beside the data."""

import re

import numpy as np
import pytest
import torch

from sparsesam.lab.display.drawing import write_images, write_plot
from sparsesam.lab.display.figure import Axis, Figure, Series, SeriesStyle
from sparsesam.lab.inspection import ANALYSES, LabeledResult
from tests.lab.report.made_runs import analyses

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.filterwarnings(f"error::{kind}") for kind in ("UserWarning", "RuntimeWarning")]


def figure(panels, kind="lines", z=None, **options):
    return Figure("a-name", "A title", "", Axis("epoch", whole=True), Axis("loss"), panels, kind, z, **options)


def figures_of(analysis):
    for name in sorted(analyses().keys() & analysis.files):
        result = analysis.result_type.from_dict(analyses()[name])
        labels = [(f"run {place}, long name", SeriesStyle("blue", place)) for place in range(3)]
        yield from analysis.figures(name, [LabeledResult(label, result, style) for label, style in labels])


@pytest.mark.parametrize("kind", ANALYSES)
def test_every_figure_of_analyses_is_drawn_without_warnings(tmp_path, kind):
    figures = list(figures_of(ANALYSES[kind]))
    drawing = write_plot(figures, tmp_path / "a.svg")
    write_plot(figures, tmp_path / "b.svg")
    assert len(drawing.subfigs) == len(figures)
    # matplotlib's solver of the layout differs in the last digits from draw to draw, so only the texts are compared.
    first, second = (re.findall("<!-- (.*) -->", (tmp_path / name).read_text()) for name in ("a.svg", "b.svg"))
    assert first == second != []


@pytest.mark.parametrize("count", [2, 12, 40])
def test_nothing_is_cut_and_panels_share_legend_below_them(count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    series = [Series(f"SSAM-F, sparsity 0.9, rho {i}", "blue", [1, 2], [i, 2 * i], i) for i in range(count)]
    drawing = write_plot([figure({"left": series, "right": series})])
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    (row,) = drawing.subfigs
    (legend,) = row.legends
    assert [text.get_text() for text in legend.get_texts()] == [line.name for line in series]
    legend, *panels = (artist.get_tightbbox(canvas.get_renderer()) for artist in (legend, *row.axes))
    assert legend.y1 <= min(axes.y0 for axes in panels) + 1
    for box in (legend, *panels):
        assert drawing.bbox.x0 - 1 <= box.x0 <= box.x1 <= drawing.bbox.x1 + 1
        assert drawing.bbox.y0 - 1 <= box.y0 <= box.y1 <= drawing.bbox.y1 + 1


def test_chosen_point_has_ring_and_name_in_legend():
    series = [Series(f"variant {i}", "blue", [i], [90 + i], i, chosen=i == 1) for i in range(3)]
    (part,) = write_plot([figure({"": series}, "points")]).subfigs
    assert [text.get_text() for text in part.legends[0].texts] == ["variant 0", "variant 1 (best choice)", "variant 2"]
    rings = [line.get_xydata().tolist() for line in part.axes[0].lines if line.get_markersize() > 10]
    assert rings == [[[1, 91]]]


def test_short_logarithmic_axis_has_plain_numbers():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    plot = Figure("a", "", "", Axis("cost", log=True), Axis("y"), {"": [Series("a", "blue", [100, 200], [0, 1])]})
    drawing = write_plot([plot])
    FigureCanvasAgg(drawing).draw()
    axes = drawing.subfigs[0].axes[0]
    low, high = axes.get_xlim()
    ticks = zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)
    assert [label.get_text() for place, label in ticks if low <= place <= high] == ["100", "150", "200"]


@pytest.mark.parametrize(("count", "bands"), [(3, 3), (4, 0)])
def test_bands_are_drawn_for_three_series_at_most_in_every_panel(count, bands):
    series = [Series(str(i), "blue", [1, 2], [i, i], bars=[(i - 1, i + 1)] * 2) for i in range(count)]
    axes, other = write_plot([figure({"": series, "other": series[:1]})]).subfigs[0].axes
    assert (len(axes.collections), len(other.collections)) == (bands, min(bands, 1))


def test_plot_has_row_per_figure_without_single_points(tmp_path):
    from PIL import Image

    line = figure({"": [Series("SAM", "blue", [1, 2], [0.5, 0.1])]})
    point = figure({"": [Series("SAM", "blue", [1], [0.5])]})
    write_plot([line], tmp_path / "one.png")
    write_plot([line, point, line], tmp_path / "two.png")
    sizes = {name: Image.open(tmp_path / f"{name}.png").size for name in ("one", "two")}
    assert 1.8 * sizes["one"][1] < sizes["two"][1] < 2.5 * sizes["one"][1]
    assert (np.asarray(Image.open(tmp_path / "one.png").convert("L")) < 128).mean() > 0.002


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_drawn_row_by_row(tmp_path, channels):
    from PIL import Image

    images = [torch.full((channels, 8, 8), value, dtype=torch.uint8) for value in (200, 50, 120)]
    write_images(images, ["a", "b"], tmp_path / "images.png", columns=2)
    picture = np.asarray(Image.open(tmp_path / "images.png").convert("L"))
    rows, columns = picture.shape
    middle = [rows // 4 + 10, 3 * rows // 4 - 10], [columns // 4, 3 * columns // 4]
    assert picture[np.ix_(*middle)].tolist() == [[200, 50], [120, 255]]
