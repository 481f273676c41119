"""Writes the tables of docs/paper.md: where each part of the paper is implemented, and where the code departs from it.

python -m tools.paper_page
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from sparsesam.lab.paper.choices import other_choices, settings_of
from sparsesam.lab.paper.recipe import Recipe, recipes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "paper.md"


def page() -> str:
    """Returns the page with new content between ``<!-- NAME -->`` and ``<!-- end -->``."""
    text = PAGE.read_text()
    for name, content in parts().items():
        text, count = re.subn(
            rf"(?<=<!-- {name} -->\n\n).*?(?=\n<!-- end -->)", lambda _, new=content: new, text, flags=re.DOTALL
        )
        assert count == 1, name
    return text


def parts() -> dict[str, str]:
    by_place = lambda recipe: (recipe.place.startswith("Figure"), _number(recipe.place))  # noqa: E731
    everything = sorted((recipe.at("full") for recipe in recipes().values()), key=by_place)
    items = [
        (item, f"{what}<br>{command}", f"{file}<br>{_code(test.strip('`').partition('::')[2])}")
        for item, what, command, file, test in _items(everything)
    ]
    notes: dict[str, list[str]] = {}
    for recipe in everything:
        for note in recipe.remarks:
            notes.setdefault(note, []).append(recipe.place)
    others = ("every other", "its default", settings_of(everything[0])[-1].mark, "all")
    settings = [*_grouped(everything, settings=True), others]
    return {
        "items": _table(("item", "what, and its command", "file, and its test"), items),
        "open": "".join(f"- **{_places(places).capitalize()}**: {note}\n" for note, places in notes.items()),
        "choices": _table(("choice", "here", "where it comes from", "in"), _grouped(everything, settings=False)),
        "settings": _table(("setting", "value", "where it comes from", "in"), settings),
    }


def _items(everything: Sequence[Recipe]) -> list[tuple[str, ...]]:
    content: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    rows: list[tuple[str, ...]] = [
        (row["item"], row["what"], _code(row["command"]), _code(row["file"]), _code(row["test"])) for row in content
    ]
    figures = "lab/paper/figures.py", "test_figures.py::test_each_figure_is_trained_analyzed_and_drawn"
    tables = "lab/paper/recipes.yaml", "test_recipe.py::test_every_cell_is_valid_run"
    for recipe in everything:
        file, test = figures if recipe.place.startswith("Figure") else tables
        command = _code(f"sparsesam paper run {recipe.label}")
        rows.append((recipe.place, recipe.title, command, _code(file), _code(f"tests/lab/paper/{test}")))
    return rows


def _grouped(everything: Sequence[Recipe], *, settings: bool) -> Iterable[tuple[str, ...]]:
    """Yields a row for each choice with one value and one origin, and the recipes that use it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for recipe in everything:
        for choice in settings_of(recipe) if settings else other_choices(recipe):
            if choice.name == "every other":  # one row for all recipes
                continue
            found.setdefault((choice.name, ", ".join(choice.values), choice.mark), []).append(recipe.place)
    order = {name: place for place, name in enumerate(dict.fromkeys(name for name, _, _ in found))}
    for (name, values, mark), places in sorted(found.items(), key=lambda item: order[item[0][0]]):
        shown = "all" if len(places) == len(everything) - (1 if settings else 0) else _places(places)
        yield (_code(name) if settings else name), values, mark, shown


def _places(places: Sequence[str]) -> str:
    """Joins Table 1, Table 2, Table 3, Figure 5 to "tables 1 to 3; figure 5"."""
    parts = []
    for kind in ("Table", "Figure"):
        numbers = sorted(_number(place) for place in places if place.startswith(kind))
        shown: list[str] = []
        for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
            span = [str(number) for _, number in group]
            shown += [f"{span[0]} to {span[-1]}"] if len(span) > 2 else span
        if shown:
            parts.append(f"{kind.lower()}{'s' if len(numbers) > 1 else ''} {', '.join(shown)}")
    return "; ".join(parts)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _number(place: str) -> int:
    return int(re.findall(r"\d+", place)[0])


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
