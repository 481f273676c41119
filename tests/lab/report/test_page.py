from sparsesam.lab.display import Series
from sparsesam.lab.report.page import MOST_POINTS, downsampled


def test_long_curve_is_downsampled_with_both_ends():
    count = 10 * MOST_POINTS
    curve = Series("SAM", "blue", list(range(count)), list(range(count)), bars=[(0.0, 1.0)] * count)
    kept = downsampled(curve)
    assert len(kept.x) <= MOST_POINTS
    assert (kept.x[0], kept.x[-1], len(kept.bars)) == (0, count - 1, len(kept.x))
    assert kept.y == kept.x


def test_other_curves_and_surfaces_are_complete():
    curve = Series("SAM", "blue", list(range(MOST_POINTS)), list(range(MOST_POINTS)))
    surface = Series("SAM", "blue", list(range(2 * MOST_POINTS)), [0], z=[[1.0] * 2 * MOST_POINTS])
    assert downsampled(curve) is curve
    assert downsampled(surface) is surface
