"""Figures as files: complete, without warnings, with the legend beside the data."""

import warnings

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


@pytest.fixture(scope="module")
def every_figure():
    return list(figures_of_all_analyses())


def figures_of_all_analyses():
    for analysis in ANALYSES.values():
        for name in analysis.files:
            if name in analyses():
                result = analysis.result_type.from_dict(analyses()[name])
                measured = [
                    LabeledResult(f"run {place}, long name", result, SeriesStyle("blue", place)) for place in range(3)
                ]
                yield from analysis.figures(name, measured)


def test_every_figure_of_analyses_is_drawn_without_warnings(every_figure, tmp_path):
    assert {one.kind for one in every_figure} == {"lines", "points", "bars", "heatmap", "surface", "contour"}
    write_figures(every_figure, tmp_path)
    for one in every_figure:
        assert (tmp_path / f"{one.name}.csv").stat().st_size > 0
        assert list(tmp_path.glob(f"{one.name}*.svg"))


def test_files_are_named_by_figure_and_panel(tmp_path):
    line = Series("SAM $x", "blue", [1, 2], [0.5, None], bars=[(0.4, 0.6), None])
    surface = Series("SAM", "blue", [0, 1], [0, 1], z=[[2.0, 3.0], [None, 1.0]])
    heights = {"one/../run": [surface], "<b>": [surface]}
    write_figures([figure({"": [line]}), figure(heights, "surface", Axis("height"))], tmp_path / "figures")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "a-name-1-one-..-run.pdf",
        "a-name-1-one-..-run.svg",
        "a-name-2-b.pdf",
        "a-name-2-b.svg",
        "a-name.csv",
        "a-name.pdf",
        "a-name.svg",
    ]
    assert b"<svg" in (tmp_path / "figures" / "a-name.svg").read_bytes()


def test_same_figure_gives_same_file(tmp_path):
    line = figure({"": [Series("SAM", "blue", [1, 2], [0.5, 0.1])]})
    for folder in ("a", "b"):
        write_figures([line], tmp_path / folder)
    for name in ("a-name.svg", "a-name.pdf"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("count", [2, 12, 40])
def test_nothing_is_cut_and_legend_does_not_cover_data(count):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    series = [Series(f"SSAM-F, sparsity 0.9, rho {i}", "blue", [1, 2], [i, 2 * i], i) for i in range(count)]
    drawing = draw([figure({"": series})])
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    (part,) = drawing.subfigs[0].subfigs
    legend, axes = (one.get_tightbbox(canvas.get_renderer()) for one in (part.legends[0], part.axes[0]))
    assert legend.y1 <= axes.y0 + 1
    for box in (legend, axes):
        assert drawing.bbox.x0 - 1 <= box.x0 <= box.x1 <= drawing.bbox.x1 + 1
        assert drawing.bbox.y0 - 1 <= box.y0 <= box.y1 <= drawing.bbox.y1 + 1


@pytest.mark.parametrize("marked", range(3))
def test_label_of_marked_point_is_within_axes_and_covers_no_point(marked):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    places = [1.0, 1.9, 2.0]
    series = [
        Series(
            f"variant {i}",
            "blue",
            [x],
            [90 + i],
            i,
            bars=[(89.5 + i, 90.5 + i)],
            mark="recommended" if i == marked else "",
        )
        for i, x in enumerate(places)
    ]
    drawing = draw([figure({"": series}, "points")])
    canvas = FigureCanvasAgg(drawing)
    canvas.draw()
    (axes,) = drawing.subfigs[0].subfigs[0].axes
    (word,) = (text for text in axes.texts if text.get_text() == "recommended")
    box = word.get_window_extent(canvas.get_renderer())
    assert axes.bbox.x0 <= box.x0 <= box.x1 <= axes.bbox.x1
    for i, x in enumerate(places):
        assert not box.contains(*axes.transData.transform((x, 90 + i)))


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
