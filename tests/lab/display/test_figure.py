import csv
import io

import pytest

from sparsesam.lab.display.figure import COLORS, PALETTE_SIZE, Axis, Figure, Series, assign_styles


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


def colors(*optimizers):
    return [color for color, _ in assign_styles(optimizers)]


def test_optimizer_has_fixed_color():
    assert colors("sgd", "sam") == ["grey", "blue"]
    assert colors("ssam-f", "sam")[1] == "blue"


def test_series_differ_in_color_and_then_in_dash():
    looks = assign_styles(["ssam-f"] * 40)
    assert len({color for color, _ in looks[:PALETTE_SIZE]}) == PALETTE_SIZE
    assert len({(color, number // PALETTE_SIZE) for color, number in looks}) == 40
    assert {color for color, _ in looks} <= COLORS.keys()


def test_symbols_differ_also_with_colors():
    assert [number for _, number in assign_styles(["sgd", "sam", "ssam-f"])] == [0, 1, 2]


def test_color_of_later_optimizer_is_reserved():
    found = colors("ssam-f", "ssam-f", "sam")
    assert (found[0], found[2]) == ("orange", "blue")
    assert found[1] not in ("orange", "blue")
