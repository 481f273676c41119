"""From a recipe's trained runs to its figure, in the paper's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsesam.lab.data import CORRUPTIONS, FolderSplits, corrupt, load
from sparsesam.lab.experiment.paper import Column, Recipe, Scale, finished_results
from sparsesam.lab.experiment.records import read_records
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Job
from sparsesam.lab.paper import drawing, measure

#: The order in the paper's figure 3.
CORRUPTED = ("resolution", "occlusion", "gaussian-noise", "fog")
_IMAGES = 4


@dataclass(frozen=True)
class Material:
    """Finished runs of a recipe, and where their data are."""

    recipe: Recipe
    scale: Scale
    jobs: Sequence[Job]
    overrides: Mapping[str, Any]
    data_dir: Path | None

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the analysis."""
        return dict(self.recipe.content[self.scale].get("analysis", {}))

    def runs(self, row: str, column: Column) -> list[Path]:
        """The directories of a cell, seed by seed."""
        wanted = self.recipe.config(row, column, self.overrides)
        return [job.directory for job in self.jobs if _without_seed(job) == {**wanted.__dict__, "seed": None}]


def draw(material: Material, file: Path) -> list[str]:
    """Measure what the figure shows, draw it to ``file``, and return its numbers in words."""
    assert material.recipe.figure is not None
    figure, said = FIGURES[material.recipe.figure](material)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return said


# ---- one function for each figure ------------------------------------------------------------------------------


def _gradients(material: Material) -> tuple[Any, list[str]]:
    panels: dict[str, dict[str, Any]] = {}
    said = []
    for column in material.recipe.columns(material.scale):
        panels[column.label] = {}
        for row in material.recipe.rows(material.scale):
            found = measure.gradients(material.runs(row, column)[0], material.options, material.data_dir)
            panels[column.label][row] = found
            said.append(f"{column.label}, {row}: r < 0 for {found['every']['share_below_zero']:.1%} of the weights")
    said.append("r is that of one training batch, at the end of the training, with a logarithm to base 10.")
    return drawing.gradients(panels), said


def _curves(material: Material) -> tuple[Any, list[str]]:
    panels: dict[str, dict[str, Any]] = {}
    for column in material.recipe.columns(material.scale):
        panels[column.label] = {}
        for row in material.recipe.rows(material.scale):
            epochs = [_epochs(run) for run in material.runs(row, column)]
            panels[column.label][row] = {
                name: np.array([[record[name] for record in one] for one in epochs])
                for name in ("train_loss", "test_accuracy")
            }
    return drawing.curves(panels), ["Lines are means over the seeds, shades reach from the lowest to the highest."]


def _sparsity(material: Material) -> tuple[Any, list[str]]:
    recipe, finished = material.recipe, finished_results(material.jobs)
    panels: dict[str, dict[str, list[drawing.Point]]] = {}
    theirs: dict[str, dict[str, list[drawing.Point]]] = {}
    place = {column.label: number for number, column in enumerate(recipe.columns("full"))}
    for row, column in recipe.cells(material.scale):
        config, method = recipe.config(row, column, {}), row.split()[0]
        at = 0.0 if config.sparsity is None else config.sparsity
        cell = recipe.cell(row, column, finished, material.overrides)
        if cell is not None:
            bar = None if cell.interval is None else (100 * cell.interval[0], 100 * cell.interval[1])
            point = drawing.Point(at, 100 * cell.mean, bar)
            panels.setdefault(column.label, {}).setdefault(method, []).append(point)
        printed = recipe.paper(row)
        if material.scale == "full" and place[column.label] < len(printed):
            point = drawing.Point(at, printed[place[column.label]], None)
            theirs.setdefault(column.label, {}).setdefault(method, []).append(point)
    said = ["Bars are 95 % intervals of the mean."] + (["Dotted lines are the paper's numbers."] if theirs else [])
    return drawing.sparsity(panels, theirs), said


def _landscape(material: Material) -> tuple[Any, list[str]]:
    found = _of_each_row(material, measure.landscape)
    said = [
        f"{row}: loss {one['center_loss']:.4g} in the middle, {_largest(one['loss']):.4g} at the highest point"
        for row, one in found.items()
    ]
    return drawing.landscapes(found), said


def _hessian(material: Material) -> tuple[Any, list[str]]:
    found = _of_each_row(material, measure.hessian)
    said = []
    for row, one in found.items():
        spectrum = one["eigenvalues"]
        said.append(
            f"{row}: lambda_1 {spectrum['eigenvalues'][0]:.4g}, lambda_1 / lambda_5 {_number(spectrum['ratio'])}"
        )
    return drawing.spectra(found), said


def _speedup(material: Material) -> tuple[Any, list[str]]:
    (column,) = material.recipe.columns(material.scale)
    lines = {}
    for row in material.recipe.rows(material.scale):
        seconds = [
            [one for record in _epochs(run) for one in record["step_seconds"]] for run in material.runs(row, column)
        ]
        lines[row] = np.mean([np.cumsum(one) for one in seconds], axis=0)
    said = ["The time of the steps themselves, without loading images and making masks."]
    return drawing.speedup(lines), said


def _corruption(material: Material) -> tuple[Any, list[str]]:
    """Images as they are, and after each corruption; for each data set that the recipe names."""
    names = {column.settings["dataset"] for column in material.recipe.columns(material.scale)}
    rows = []
    for name in sorted(names):
        splits = load(name, material.data_dir)
        if isinstance(splits, FolderSplits):
            raise ValueError(f"dataset must be one that is held in memory, got {name!r}")
        images = splits.train.images[:_IMAGES]
        generator = torch.Generator().manual_seed(0)
        changed = [corrupt(images, 1.0, kind, generator).images for kind in CORRUPTED]
        rows += [[one[place] for one in (images, *changed)] for place in range(len(images))]
    assert set(CORRUPTED) == set(CORRUPTIONS)
    return drawing.corruptions(("image", *CORRUPTED), rows), []


FIGURES: dict[str, Callable[[Material], tuple[Any, list[str]]]] = {
    "gradients": _gradients,
    "curves": _curves,
    "sparsity": _sparsity,
    "landscape": _landscape,
    "hessian": _hessian,
    "speedup": _speedup,
    "corruption": _corruption,
}


# ---- small things ----------------------------------------------------------------------------------------------


def _of_each_row(
    material: Material, analysis: Callable[[Path, Mapping[str, Any], Path | None], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Of the first seed's run, which is where the paper's figures have one network."""
    (column,) = material.recipe.columns(material.scale)
    return {
        row: analysis(material.runs(row, column)[0], material.options, material.data_dir)
        for row in material.recipe.rows(material.scale)
    }


def _without_seed(job: Job) -> dict[str, Any]:
    return {**job.config.__dict__, "seed": None}


def _epochs(directory: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(RunDirectory(directory).records) if record["kind"] == "epoch"]


def _largest(loss: Sequence[Sequence[float | None]]) -> float:
    return max((value for line in loss for value in line if value is not None), default=float("nan"))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
