import math

import pytest

from sparsesam.lab.display.numbers import number, percent, ratio, significant


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (0.5000001, "0.5"),
        (1234567, "1,234,567"),
        (849.3, "849"),
        (999.7, "1,000"),
        (12.345, "12.3"),
        (0.00123, "0.00123"),
        (1.2345e-7, "1.23e-07"),
        (2.5e12 + 0.5, "2.5e+12"),
        (0, "0"),
        (-3.14159, "-3.14"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_numbers_have_no_needless_digits(value, text):
    assert significant(value) == text


def test_shares_are_percentages_with_one_decimal_or_two_near_hundred():
    assert percent(0.97812) == "97.8 %"
    assert percent(0.97812, 0.0041) == "97.8 ± 0.4 %"
    assert percent(0.99312, 0.0012) == "99.31 ± 0.12 %"
    assert percent(None) == "–"


def test_ratios_have_two_decimals():
    assert (ratio(2.0), ratio(None)) == ("2.00", "–")


def test_non_finite_number_is_none():
    assert [number(value) for value in (1, 2.5, True, "3", math.inf, 10**400, None)] == [1.0, 2.5, *[None] * 5]
