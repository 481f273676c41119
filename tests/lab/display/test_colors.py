from sparsesam.lab.display.figure import COLORS, PALETTE_SIZE, assign_styles


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
