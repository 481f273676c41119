"""Figures as files: complete, without warnings, with the legend beside the data."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsesam.lab.display.drawing import check_plot, draw, write_figures, write_images, write_plot
from sparsesam.lab.display.figure import Axis, Figure, Series, SeriesStyle
from sparsesam.lab.inspection import ANALYSES, LabeledResult
from tests.lab.report.made_runs import analyses

pytest.importorskip("matplotlib")


def figure(panels, kind="lines", z=None, **options):
    return Figure("a-name", "A title", "", Axis("epoch", whole=True), Axis("loss"), panels, kind, z, **options)


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("error", category)
        yield


def figures_of_all_analyses():
    for analysis in ANALYSES.values():
        for name in analyses().keys() & analysis.files:
            result = analysis.result_type.from_dict(analyses()[name])
            labels = [(f"run {place}, long name", SeriesStyle("blue", place)) for place in range(3)]
            yield from analysis.figures(name, [LabeledResult(label, result, style) for label, style in labels])


def test_every_figure_of_analyses_is_drawn_without_warnings(tmp_path):
    figures = list(figures_of_all_analyses())
    assert {figure.kind for figure in figures} == {"lines", "points", "bars", "heatmap", "surface", "contour"}
    write_figures(figures, tmp_path)
    for figure in figures:
        assert (tmp_path / f"{figure.name}.csv").stat().st_size > 0
        assert list(tmp_path.glob(f"{figure.name}*.svg"))


def test_files_are_named_by_figure_and_panel_and_reproducible(tmp_path):
    line = Series("SAM $x", "blue", [1, 2], [0.5, None], bars=[(0.4, 0.6), None])
    surface = Series("SAM", "blue", [0, 1], [0, 1], z=[[2.0, 3.0], [None, 1.0]])
    heights = {"one/../run": [surface], "<b>": [surface]}
    for folder in ("a", "b"):
        write_figures([figure({"": [line]}), figure(heights, "surface", Axis("height"))], tmp_path / folder)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    panels = [f"a-name{panel}.{kind}" for panel in ("-1-one-..-run", "-2-b", "") for kind in ("pdf", "svg")]
    assert sorted(files) == sorted(["a-name.csv", *panels])
    assert b"<svg" in files["a-name.svg"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}


@pytest.mark.parametrize("count", [2, 12, 40])
def test_nothing_is_cut_and_panels_share_legend_below_them(count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    series = [Series(f"SSAM-F, sparsity 0.9, rho {i}", "blue", [1, 2], [i, 2 * i], i) for i in range(count)]
    drawing = draw([figure({"left": series, "right": series})])
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
    drawing = draw([figure({"": series}, "points")])
    part = drawing.subfigs[0]
    (axes,) = part.axes
    assert [text.get_text() for text in part.legends[0].texts] == ["variant 0", "variant 1 (best choice)", "variant 2"]
    rings = [line.get_xydata().tolist() for line in axes.lines if line.get_markersize() > 10]
    assert rings == [[[1, 91]]]


@pytest.mark.parametrize(("count", "bands"), [(3, 3), (4, 0)])
def test_bands_are_drawn_for_three_series_at_most(count, bands):
    series = [Series(str(i), "blue", [1, 2], [i, i], bars=[(i - 1, i + 1)] * 2) for i in range(count)]
    (axes,) = draw([figure({"": series})]).subfigs[0].axes
    assert len(axes.collections) == bands


def test_plot_has_row_per_figure_without_single_points(tmp_path):
    from PIL import Image

    line = figure({"": [Series("SAM", "blue", [1, 2], [0.5, 0.1])]})
    point = figure({"": [Series("SAM", "blue", [1], [0.5])]})
    write_plot([line], tmp_path / "one.png")
    write_plot([line, point], tmp_path / "with-point.png")
    write_plot([line, line], tmp_path / "two.png")
    sizes = {name: Image.open(tmp_path / f"{name}.png").size for name in ("one", "with-point", "two")}
    assert sizes["one"] == sizes["with-point"]
    assert sizes["two"][1] > 1.8 * sizes["one"][1]
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


def test_unsupported_suffix_raises(tmp_path):
    with pytest.raises(ValueError, match=r"plot must end in \.png, \.svg, \.pdf, got 'a\.gif'"):
        check_plot(tmp_path.__class__("a.gif"))


@pytest.mark.parametrize(("ends", "labels"), [((8, 72), ["10", "15", "20", "30", "50", "70"]), ((1, 1e4), None)])
def test_short_logarithmic_axis_has_more_labels_than_powers_of_ten(ends, labels):
    line = Series("SAM", "blue", ends, [1, 2])
    drawing = draw([replace(figure({"": [line]}), x=Axis("cost", log=True))])
    drawing.draw_without_rendering()
    ((axes,),) = (row.axes for row in drawing.subfigs)
    low, high = axes.get_xlim()
    shown = [text.get_text() for text in axes.get_xticklabels() if low <= text.get_position()[0] <= high]
    assert shown == labels if labels else all("10^" in text for text in shown)
