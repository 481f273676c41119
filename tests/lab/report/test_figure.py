import csv
import io

from sparsesam.lab.report.downsample import BUDGET, downsampled, points_per_curve
from sparsesam.lab.report.figure import Axis, Figure, Series, to_csv
from sparsesam.lab.report.figure_files import write_figures


def figure(panels, kind="lines", z=None):
    return Figure("a-name", "A title", "", kind, Axis("epoch"), Axis("loss"), panels, z)


def read(text):
    return list(csv.reader(io.StringIO(text)))


def test_csv_has_a_row_per_point_under_the_axes_titles():
    one = Series("SAM, rho 0.1", "sam", [1, 2], [0.5, None], error=[0.1, None])
    other = Series("SGD", "sgd", [1], [0.25])
    assert read(to_csv(figure({"": [one, other]}))) == [
        ["series", "epoch", "loss", "±"],
        ["SAM, rho 0.1", "1", "0.5", "0.1"],
        ["SAM, rho 0.1", "2", "", ""],
        ["SGD", "1", "0.25", ""],
    ]


def test_csv_of_a_surface_has_a_row_per_place_and_names_the_panel():
    surface = Series("SAM", "sam", [0, 1], [5], z=[[2.0, 3.0]])
    drawn = figure({"first": [surface], "second": [surface]}, "surface", Axis("height"))
    assert read(to_csv(drawn))[:3] == [
        ["panel", "series", "epoch", "loss", "height"],
        ["first", "SAM", "0", "5", "2.0"],
        ["first", "SAM", "1", "5", "3.0"],
    ]


def test_a_curve_is_thinned_to_its_limit_with_both_ends():
    curve = Series("SAM", "sam", list(range(1000)), list(range(1000)), error=[0.0] * 1000)
    kept = downsampled(curve, 100)
    assert len(kept.x) <= 100
    assert (kept.x[0], kept.x[-1], len(kept.error)) == (0, 999, len(kept.x))
    assert downsampled(curve, 1000) is curve


def test_many_curves_share_the_budget():
    curve = Series("SAM", "sam", list(range(1000)), list(range(1000)))
    assert points_per_curve([figure({"": [curve]})]) == 500
    assert points_per_curve([figure({"": [curve] * 1000})]) == BUDGET // 1000


def test_files_for_a_paper(tmp_path):
    line = Series("SAM $x", "sam", [1, 2], [0.5, None], error=[0.1, None])
    surface = Series("SAM", "sam", [0, 1], [0, 1], z=[[2.0, 3.0], [None, 1.0]])
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
