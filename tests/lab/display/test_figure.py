import csv
import io

import pytest

from sparsesam.lab.display.figure import Axis, Figure, Series


def figure(panels, kind="lines", z=None):
    return Figure("a-name", "A title", "", Axis("epoch"), Axis("loss"), panels, kind, z)


def read(text):
    return list(csv.reader(io.StringIO(text)))


def test_csv_has_row_per_point_under_axis_titles():
    one = Series("SAM, rho 0.1", "blue", [1, 2], [0.5, None], bars=[(0.4, 0.6), None])
    other = Series("SGD", "grey", [1], [0.25])
    assert read(figure({"": [one, other]}).to_csv()) == [
        ["series", "epoch", "loss", "low", "high"],
        ["SAM, rho 0.1", "1", "0.5", "0.4", "0.6"],
        ["SAM, rho 0.1", "2", "", "", ""],
        ["SGD", "1", "0.25", "", ""],
    ]


def test_csv_of_surface_has_row_per_point_and_names_panel():
    surface = Series("SAM", "blue", [0, 1], [5], z=[[2.0, 3.0]])
    drawn = figure({"first": [surface], "second": [surface]}, "surface", Axis("height"))
    assert read(drawn.to_csv())[:3] == [
        ["panel", "series", "epoch", "loss", "height"],
        ["first", "SAM", "0", "5", "2.0"],
        ["first", "SAM", "1", "5", "3.0"],
    ]


@pytest.mark.parametrize(
    ("kind", "series", "expected"),
    [
        ("lines", [Series("a", "blue", [1, 2], [1, None])], False),
        ("lines", [Series("a", "blue", [1, 2], [1, 2])], True),
        ("points", [Series("a", "blue", [1], [1])], False),
        ("points", [Series("a", "blue", [1], [1]), Series("b", "blue", [1], [2])], True),
        ("points", [Series("a", "blue", [1], [1]), Series("level", "blue", [0, 1], [2, 2], faint=True)], False),
        ("surface", [Series("a", "blue", [1, 2], [1], z=[[None, 1.0]])], False),
    ],
)
def test_single_points_are_not_content(kind, series, expected):
    assert figure({"": series}, kind).has_content is expected
