from pathlib import Path

import pytest
import yaml
from tools import paper_page as module
from tools.paper_page import _items, _places, page

from sparsesam.lab.paper.recipe import recipes

ROOT = Path(__file__).parents[2]
ITEMS = {row[0]: row for row in _items(list(recipes().values()))}


def test_page_is_up_to_date():
    assert module.PAGE.read_text() == page(), "regenerate it: python -m tools.paper_page"


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_has_file_and_test(item):
    _, _, _, file, test = (cell.strip("`") for cell in ITEMS[item])
    assert (ROOT / "src" / "sparsesam" / file).is_file()
    place, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / place).read_text()


def test_every_equation_theorem_table_and_figure_is_listed():
    numbers = " ".join(row["item"] for row in yaml.safe_load(Path(module.__file__).with_suffix(".yaml").read_text()))
    for number in range(1, 17):
        assert f" {number}" in numbers or f".{number}" in numbers
    assert all(f"Theorem {number}" in numbers for number in (1, 2, 3))
    assert all(f"Lemma {number}" in numbers for number in range(1, 6))
    assert {f"Table {number}" for number in range(1, 17)} <= set(ITEMS)
    assert {f"Figure {number}" for number in (1, 3, 4, 5, 6, 7, 8)} <= set(ITEMS)


def test_places_are_abbreviated():
    assert _places(["Table 1", "Table 2", "Table 3", "Table 5", "Figure 7"]) == "tables 1 to 3, 5; figure 7"
