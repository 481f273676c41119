from sparsesam.lab.display.figure import Axis, Figure, Series
from sparsesam.lab.report.page import BUDGET, downsampled, points_per_curve


def figure(panels):
    return Figure("a-name", "A title", "", Axis("epoch"), Axis("loss"), panels)


def test_a_curve_is_thinned_to_its_limit_with_both_ends():
    curve = Series("SAM", "blue", list(range(1000)), list(range(1000)), bars=[(0.0, 1.0)] * 1000)
    kept = downsampled(curve, 100)
    assert len(kept.x) <= 100
    assert (kept.x[0], kept.x[-1], len(kept.bars)) == (0, 999, len(kept.x))
    assert downsampled(curve, 1000) is curve


def test_many_curves_share_the_budget():
    curve = Series("SAM", "blue", list(range(1000)), list(range(1000)))
    assert points_per_curve([figure({"": [curve]})]) == 500
    assert points_per_curve([figure({"": [curve] * 1000})]) == BUDGET // 1000
