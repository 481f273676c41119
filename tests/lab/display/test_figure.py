from typing import get_args, get_type_hints

import pytest

from sparsesam.lab.display.figure import COLORS, OPTIMIZERS, Axis, Figure, Series, assign_styles, side_by_side
from sparsesam.lab.experiment.config import TrainConfig


def figure(panels, kind="lines", z=None):
    return Figure("a-name", "A title", "", Axis("epoch"), Axis("loss"), panels, kind, z)


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
    assert figure({"first": series, "second": series}, kind).has_content is expected


def test_method_has_one_color_and_marker_in_every_figure():
    few, many = assign_styles(["sam", "sgd"]), assign_styles(["ssam-f", "sgd", "sgd", "adam", "sam"])
    assert few[0] == many[-1]
    assert few[1] == many[1]
    assert len({(style.color, style.marker) for style in assign_styles(list(OPTIMIZERS))}) == len(OPTIMIZERS)
    assert {color for _, color in OPTIMIZERS.values()} <= COLORS.keys()


def test_every_optimizer_of_a_run_has_a_name_and_a_color():
    assert set(get_args(get_type_hints(TrainConfig)["optimizer"])) <= OPTIMIZERS.keys()


def test_variants_of_method_are_numbered():
    styles = assign_styles(["ssam-f", "sam", "ssam-f"])
    assert [style.variant for style in styles] == [0, 0, 1]
    assert styles[0][:2] == styles[2][:2]


def test_series_without_method_have_colors_that_no_method_here_has():
    sam, other, third = assign_styles(["sam", "", ""])
    assert len({sam.color, other.color, third.color}) == 3


def point(x, y, width=0.0):
    return Series("a", "blue", [x], [y], bars=[(y - width, y + width)] if width else None)


def test_points_that_hide_each_other_are_drawn_side_by_side():
    shifts = [
        series.shift for series in side_by_side([point(1, 90), point(2, 80), point(2, 80), point(2, 95), point(3, 80)])
    ]
    assert shifts == pytest.approx([0, -0.025, 0.025, 0, 0])
    same_bars = side_by_side([point(1, 80, 3), point(1, 84, 3), point(2, 80)])
    assert [series.shift for series in same_bars] == pytest.approx([-0.0125, 0.0125, 0])
    assert side_by_side([]) == []
