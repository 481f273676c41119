from sparsesam.lab.display.colors import COLORS, assign_colors


def test_an_optimizer_has_its_own_colour_wherever_it_stands():
    assert dict(zip(("sgd", "sam"), assign_colors(["sgd", "sam"]), strict=True)) == {
        "sgd": ("grey", 0),
        "sam": ("blue", 0),
    }
    assert assign_colors(["ssam-f", "sam"])[1] == ("blue", 0)


def test_variants_of_one_optimizer_differ_in_colour_first_and_then_in_style():
    looks = assign_colors(["ssam-f"] * 40)
    assert len(set(looks)) == 40
    assert len({color for color, _ in looks[:11]}) == 11
    assert {color for color, _ in looks} <= COLORS.keys()


def test_the_colour_of_another_optimizer_is_not_taken_before_it_comes():
    looks = assign_colors(["ssam-f", "ssam-f", "sam"])
    assert looks[2] == ("blue", 0)
    assert looks[1][0] not in ("orange", "blue")
