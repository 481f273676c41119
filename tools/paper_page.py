"""Writes docs/paper.md: where each part of the paper is implemented, and where the code departs from it.

python -m tools.paper_page > docs/paper.md
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

_HEAD = """<!-- Written by `python -m tools.paper_page > docs/paper.md`; change the data, not this page. -->

# Reproducing the paper

*Systematic Investigation of Sparse Perturbed Sharpness-Aware Minimization Optimizer* (Mi et al., 2023): each table
and figure is a command, at two scales.

    sparsesam paper list
    sparsesam paper show label-noise --scale full       # settings, and the paper's numbers
    sparsesam paper run label-noise                     # laptop scale: minutes on the digits
    sparsesam paper run label-noise --scale full --dry-run   # does it run? what will it cost?
    sparsesam paper run label-noise --scale full --gpus 8 --data-dir DATA
    sparsesam paper run hessian --plot hessian.png      # a figure: trains, analyzes and draws

- **Laptop scale**: small networks and wrong labels instead of large networks and hard data, with settings of this
  project. Compare its rows with each other, not with the paper's values. SGD's epochs and weight decay are tuned on
  validation images, once for each network and task, and stand in the recipe: trained as long as SAM, SGD memorizes
  the wrong labels.
- **Full scale**: the hyper-parameters of the paper's text, and choices of this project where it gives none; `paper
  show` marks the origin of every setting. It needs GPUs and has not been run; the tests include dry runs of it.

A name is a label of the paper (`tab:corruption`, `nm_vit`), an alias (`landscape`) or a number (`figure 7`). The
result is a table with the measured values next to the paper's: the mean over `--seeds` and its 95 % interval,
followed by overridden settings, the changes of the laptop scale, the machine, and the differences that are not
significant. `--set NAME=VALUE` changes a setting of all runs; a setting that rows or columns vary raises an error.
Times are measured in separate short runs with nothing else running. `python -m benchmarks nm_vit` measures the ViT
timing at a size that fits the machine.

A dry run builds the model and the optimizer of every run and takes two steps on generated images where memory allows:
with the run's own batch on a GPU, with two images on a CPU. It prints the estimated cost: steps, forward-backwards,
GPU hours at a given throughput (`--tflops`), GPU memory; for a figure also the passes of its analysis.

The figures (`grad-diff`, `corruption-images`, `train-curve`, `sparsity-acc`, `landscape`, `hessian`, `speedup`) share
their networks, save each analysis in `RUN/analyses`, and are drawn to `--plot` or into the directory of the runs.
"""
_OPEN = """
## What the paper leaves open, misprints, and where its authors' code differs

"""
_SETTINGS = """
## Every setting

At full scale. *From the paper* gives the place in its text; *from the authors' published settings* refers to what
they published besides the paper, their code and its README; *ours* gives a reason.

"""
_CHOICES = """
## Choices that are not settings

"""
_ITEMS = """
## Each equation, theorem, table and figure

Files are those in src/sparsesam; `pytest -k TEST` runs a test. The proofs in the supplement
are not code: the inequality of each lemma is checked along real steps on problems with known constants, and a stronger
one is shown to fail; constants and rates are checked with the theorems.

"""


def page() -> str:
    """The whole page."""
    everything = sorted(
        (recipe.at("full") for recipe in recipes().values()),
        key=lambda recipe: (recipe.place.startswith("Figure"), _number(recipe.place)),
    )
    parts = [
        _HEAD,
        _ITEMS,
        _table(
            ("item", "what, and its command", "file, and its test"),
            [
                (item, f"{what}<br>{command}", f"{file}<br>{_code(test.strip('`').partition('::')[2])}")
                for item, what, command, file, test in _items(everything)
            ],
        ),
        _OPEN,
        *(f"- **{_places(places).capitalize()}**: {note}\n" for note, places in _notes(everything).items()),
        _CHOICES,
        _table(("choice", "here", "where it comes from", "in"), _grouped(everything, settings=False)),
        _SETTINGS,
        _table(
            ("setting", "value", "where it comes from", "in"),
            [
                *_grouped(everything, settings=True),
                ("every other", "its default", settings_of(everything[0])[-1].mark, "all"),
            ],
        ),
    ]
    return "".join(parts)


def _notes(everything: Sequence[Recipe]) -> dict[str, list[str]]:
    """The notes, and the places that have each."""
    found: dict[str, list[str]] = {}
    for recipe in everything:
        for note in recipe.remarks:
            found.setdefault(note, []).append(recipe.place)
    return found


def _items(everything: Sequence[Recipe]) -> list[tuple[str, ...]]:
    content: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    rows: list[tuple[str, ...]] = [
        (row["item"], row["what"], _code(row["command"]), _code(row["file"]), _code(row["test"])) for row in content
    ]
    for recipe in everything:
        is_drawn = recipe.place.startswith("Figure")
        file = "lab/paper/figures.py" if is_drawn else "lab/paper/recipes.yaml"
        test = (
            "tests/lab/paper/test_figures.py::test_each_figure_is_trained_analyzed_and_drawn"
            if is_drawn
            else "tests/lab/paper/test_recipe.py::test_every_cell_is_valid_run"
        )
        command = _code(f"sparsesam paper run {recipe.label}")
        rows.append((recipe.place, recipe.title, command, _code(file), _code(test)))
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
        if numbers:
            parts.append(f"{kind.lower()}{'s' if len(numbers) > 1 else ''} {', '.join(_runs(numbers))}")
    return "; ".join(parts)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Joins three or more consecutive numbers to a range."""
    shown = []
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        span = [str(number) for _, number in group]
        shown += [f"{span[0]} to {span[-1]}"] if len(span) > 2 else span
    return shown


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _number(place: str) -> int:
    return int(re.findall(r"\d+", place)[0])


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    print(page(), end="")
