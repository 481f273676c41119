"""Beyond the limit for exact choices, the choice is nearly optimal."""

import pytest

from sparsesam.budget.choice import best_prefixes, best_subset


def test_pruned_choices_are_nearly_optimal():
    sizes = [2.0**place for place in range(16)]  # every total is possible, and none dominates another
    chosen = best_subset(sizes, sizes, 40_000.5)
    assert 40_000 * 0.999 <= sum(sizes[place] for place in chosen) <= 40_000


def test_fewer_choices_are_exact():
    assert best_subset([6.0, 5.0, 5.0], [6.0, 5.0, 5.0], 10.0) == [1, 2]


@pytest.mark.parametrize("choose", [best_subset, best_prefixes])
def test_no_items(choose):
    assert choose([], [], 1.0) == []
