"""Pages and pictures that are made by tools/."""

import re
from pathlib import Path

import pytest
import yaml
from tools import gallery, paper_page, settings_page

from sparsesam.lab.paper.recipe import recipes
from tests.docs.pages import ROOT

ITEMS = {row[0]: row for row in paper_page._items(list(recipes().values()))}
#: Options that make the commands of the gallery quick.
LESS = {
    "train": ["--epochs", "2", "--train-size", "128", "--test-size", "32", "--logger", "none"],
    "landscape": ["--points", "3", "--samples", "32"],
    "hessian": ["--samples", "32", "--trace-probes", "2", "--density-probes", "1", "--density-steps", "5"],
    "fisher": ["--samples", "32", "--probes", "2"],
    "convergence": ["--steps", "20", "--runs", "2"],
    "masks": [],
}


@pytest.mark.parametrize("tool", [paper_page, settings_page])
def test_page_is_up_to_date(tool):
    assert tool.PAGE.read_text() == tool.page(), f"run python -m {tool.__name__}"


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_of_the_paper_has_file_and_test(item):
    _, _, _, file, test = (cell.strip("`") for cell in ITEMS[item])
    assert (ROOT / "src" / "sparsesam" / file).is_file()
    place, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / place).read_text()


def test_every_equation_theorem_table_and_figure_is_listed():
    written = yaml.safe_load(Path(paper_page.__file__).with_suffix(".yaml").read_text())
    equations = " ".join(row["item"].partition("Eq.")[2] for row in written)
    assert set(re.findall(r"\d+", equations)) >= {str(number) for number in range(1, 17)}
    wanted = {"Table": range(1, 17), "Figure": (1, 3, 4, 5, 6, 7, 8)}
    assert {f"{kind} {number}" for kind, those in wanted.items() for number in those} <= set(ITEMS)
    shown = " ".join(ITEMS)
    assert all(f"Theorem {number}" in shown for number in (1, 2, 3))
    assert all(f"Lemma {number}" in shown for number in range(1, 6))


def test_every_picture_is_made_by_its_commands(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    for command in gallery.commands():
        kind = command[1] if command[0] == "analyze" else "train"
        less = LESS.get(kind, ["--samples", "32"])
        gallery.run(command, *less, *(["--mask-epochs", "1"] if "--mask-epochs" in command else []))
    for name in gallery.SHOWN:
        gallery.draw(name, tmp_path / f"{name}.png")
        assert f"(gallery/{name}.png)" in gallery.PAGE.read_text()
        assert (gallery.PICTURES / f"{name}.png").exists()
