from sparsesam.lab.display.figure import COLORS, PALETTE_SIZE, assign_styles


def colors(*optimizers):
    return [color for color, _ in assign_styles(optimizers)]


def test_an_optimizer_has_its_own_colour_wherever_it_stands():
    assert colors("sgd", "sam") == ["grey", "blue"]
    assert colors("ssam-f", "sam")[1] == "blue"


def test_as_many_series_as_colours_differ_in_colour_and_the_next_in_their_dash():
    looks = assign_styles(["ssam-f"] * 40)
    assert len({color for color, _ in looks[:PALETTE_SIZE]}) == PALETTE_SIZE
    assert len({(color, number // PALETTE_SIZE) for color, number in looks}) == 40
    assert {color for color, _ in looks} <= COLORS.keys()


def test_symbols_differ_also_where_colours_do():
    assert [number for _, number in assign_styles(["sgd", "sam", "ssam-f"])] == [0, 1, 2]


def test_the_colour_of_another_optimizer_is_not_taken_before_it_comes():
    found = colors("ssam-f", "ssam-f", "sam")
    assert (found[0], found[2]) == ("orange", "blue")
    assert found[1] not in ("orange", "blue")
