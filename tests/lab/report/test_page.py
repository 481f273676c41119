from sparsesam.lab.display import Axis, Figure, Series
from sparsesam.lab.report.page import BUDGET, MOST_POINTS, downsampled, points_per_curve


def test_long_curve_is_downsampled_with_both_ends():
    count = 10 * MOST_POINTS
    curve = Series("SAM", "blue", list(range(count)), list(range(count)), bars=[(0.0, 1.0)] * count)
    kept = downsampled(curve, MOST_POINTS)
    assert len(kept.x) <= MOST_POINTS
    assert (kept.x[0], kept.x[-1], len(kept.bars)) == (0, count - 1, len(kept.x))
    assert kept.y == kept.x


def test_other_curves_and_surfaces_are_complete():
    curve = Series("SAM", "blue", list(range(MOST_POINTS)), list(range(MOST_POINTS)))
    surface = Series("SAM", "blue", list(range(2 * MOST_POINTS)), [0], z=[[1.0] * 2 * MOST_POINTS])
    assert downsampled(curve, MOST_POINTS) is curve
    assert downsampled(surface, MOST_POINTS) is surface


def test_many_curves_share_budget():
    curve = Series("SAM", "blue", list(range(1000)), list(range(1000)))

    def points(curves):
        return points_per_curve([Figure("loss", "", "", Axis("epoch"), Axis("loss"), {"": [curve] * curves})])

    assert points(1) == MOST_POINTS
    assert points(1000) == BUDGET // 1000
    assert points(10**6) == 20
