"""Draws the figure of a recipe from its trained runs: a panel for each network, a line for each optimizer."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsesam.lab.data import Splits, corrupt, load_dataset
from sparsesam.lab.display import Axis, Figure, Series, SeriesStyle, assign_styles, cells, write_images, write_plot
from sparsesam.lab.experiment.result import EpochRecord, read_epochs
from sparsesam.lab.experiment.run_directory import RunDirectory, read_json
from sparsesam.lab.experiment.variants import grouped, mean_curve
from sparsesam.lab.inspection import Analysis, LabeledResult, TrainedRun, load_run
from sparsesam.lab.inspection.gradients import GradientAnalysis
from sparsesam.lab.inspection.hessian import HessianAnalysis
from sparsesam.lab.inspection.landscape import LandscapeAnalysis
from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.recipe import Column

#: The order in the paper's figure 3.
CORRUPTED = ("resolution", "occlusion", "gaussian-noise", "fog")


def draw_figure(trained: RecipeRuns, file: Path) -> list[str]:
    """Measure what the figure shows, draw it to ``file``, and return sentences with its numbers."""
    assert trained.recipe.figure is not None
    if trained.recipe.figure == "corruption":
        write_images(_corrupted(trained), ("image", *CORRUPTED), file, columns=1 + len(CORRUPTED))
        return []
    figures, sentences = FIGURES[trained.recipe.figure](trained)
    write_plot(figures, file)
    return sentences


def _measured(kind: type[Analysis[Any]], trained: RecipeRuns) -> tuple[list[Figure], list[str]]:
    """The first figure of an analysis of the first seed's runs, as the paper's figures show one network of each row.

    r of SAM's and SGD's gradient is that on one batch as in training: of its size, with batch statistics. The other
    analyses have a panel, with axes of its own, for each row: SGD's eigenvalues can be ten times the others'.
    """
    recipe, panels, sentences = trained.recipe, dict[str, Sequence[Series]](), list[str]()
    for column in recipe.columns:
        results = []
        for row, style in _styles(trained).items():
            job, options = trained.of(row, column).runs[0], recipe.analysis
            on = {"data_dir": trained.data_dir, "samples": options.pop("samples", job.config.batch_size)}
            if kind is GradientAnalysis:
                on |= {"batch_size": job.config.batch_size, "statistics": "batch"}
                options["rho"] = job.config.rho
            results.append(LabeledResult(row, _kept(load_run(job.directory, **on), kind(**options)), style))
            summary = kind.summary(results[-1].result)
            shown = [f"{name} {cell.text}" for name, cell in zip(summary, cells(*summary.values()), strict=True)]
            sentences.append(f"{column.label}, {row}: {', '.join(shown)}")
        figure = kind.figures(kind.files[0], results)[0]
        if kind is GradientAnalysis:
            panels[column.label] = figure.panels["every weight"]
        else:
            panels |= {series.name: [series] for series in figure.series}
    return [replace(figure, panels=panels)], sentences


def _curves(trained: RecipeRuns) -> tuple[list[Figure], list[str]]:
    """Training loss and test accuracy of every epoch."""
    figures = []
    for name, title, unit, factor in (
        ("train_loss", "Training loss", "", 1.0),
        ("test_accuracy", "Test accuracy", " (%)", 100.0),
    ):
        panels: dict[str, list[Series]] = {column.label: [] for column in trained.recipe.columns}
        for column, (row, style) in itertools.product(trained.recipe.columns, _styles(trained).items()):
            runs = _epochs(trained, row, column)
            curves = [{record.epoch: factor * getattr(record, name) for record in run} for run in runs]
            panels[column.label].append(mean_curve(style, row, curves))
        figures.append(Figure(name, title, "", Axis("epoch", whole=True), Axis(title.lower() + unit), panels))
    return figures, ["Lines are means over the seeds, shades their 95 % intervals from three seeds on."]


def _sparsity(trained: RecipeRuns) -> tuple[list[Figure], list[str]]:
    """Accuracy against sparsity, with SAM as a horizontal line; at full scale also the paper's numbers, dotted."""
    recipe, numbers = trained.recipe, trained.numbers()
    rows = grouped(recipe.row_labels, lambda row: row.split()[0])
    styles = dict(zip(rows, assign_styles([method.lower() for method in rows]), strict=True))
    right = max(config.sparsity or 0.0 for config in recipe.configs)
    panels: dict[str, list[Series]] = {column.label: [] for column in recipe.columns}
    for (place, column), (method, of_method) in itertools.product(enumerate(recipe.columns), rows.items()):
        curves, printed = defaultdict[int, dict[float, float]](dict), dict[float, float]()
        for row in of_method:
            at = (0.0, right) if method == "SAM" else (recipe.config(row, column).sparsity or 0.0,)
            for seed, share in numbers.get((row, column.label), {}).items():
                curves[seed] |= dict.fromkeys(at, 100 * share)
            for number in recipe.rows[row]["paper"][place : place + 1]:
                printed |= dict.fromkeys(at, number)
        ours = mean_curve(styles[method], method, list(curves.values()), highest=100.0)
        theirs = styles[method].series(f"{method}, paper", printed, printed.values(), faint=True)
        panels[column.label] += [ours, theirs] if recipe.scale == "full" else [ours]
    figure = Figure("sparsity", "Test accuracy", "", Axis("sparsity"), Axis("test accuracy (%)"), panels)
    return [figure], ["Shades are 95 % intervals of the mean; dotted lines, at full scale, the paper's numbers."]


def _speedup(trained: RecipeRuns) -> tuple[list[Figure], list[str]]:
    """Running time against training iterations."""
    (column,), lines = trained.recipe.columns, []
    for row, style in _styles(trained).items():
        runs = _epochs(trained, row, column)
        steps = [[seconds for record in run for seconds in record.step_seconds] for run in runs]
        lines.append(mean_curve(style, row, [dict(enumerate(np.cumsum([0.0, *of_run]))) for of_run in steps]))
    x, y = Axis("training iteration", whole=True), Axis("running time (s)")
    sentences = ["The time of the steps themselves, without loading images and mask refreshes."]
    return [Figure("speedup", "Running time", "", x, y, {"": lines})], sentences


FIGURES: dict[str, Callable[[RecipeRuns], tuple[list[Figure], list[str]]]] = {
    "gradients": partial(_measured, GradientAnalysis),
    "curves": _curves,
    "sparsity": _sparsity,
    "landscape": partial(_measured, LandscapeAnalysis),
    "hessian": partial(_measured, HessianAnalysis),
    "speedup": _speedup,
}


def _corrupted(trained: RecipeRuns) -> list[torch.Tensor]:
    """Returns four original images and each corruption of them, for each data set of the recipe."""
    found: list[torch.Tensor] = []
    for name in sorted({column.settings["dataset"] for column in trained.recipe.columns}):
        splits = load_dataset(name, trained.data_dir)
        assert isinstance(splits, Splits)
        images, generator = splits.train.images[:4], torch.Generator().manual_seed(0)
        kinds = [images, *(corrupt(images, 1.0, kind, generator) for kind in CORRUPTED)]
        found += torch.stack(kinds, dim=1).flatten(0, 1)
    return found


def _epochs(trained: RecipeRuns, row: str, column: Column) -> list[list[EpochRecord]]:
    """Read the records of a cell, one list per seed."""
    return [read_epochs(RunDirectory(job.directory).records) for job in trained.of(row, column).runs]


def _styles(trained: RecipeRuns) -> dict[str, SeriesStyle]:
    rows, column = trained.recipe.row_labels, trained.recipe.columns[0]
    return dict(zip(rows, assign_styles([trained.recipe.config(row, column).optimizer for row in rows]), strict=True))


def _kept(run: TrainedRun, analysis: Analysis[Any]) -> Any:
    """Read the result in ``RUN/analyses`` if weights, images and options are the same; else measure and write it."""
    wanted = {**analysis.origin(run), "options": analysis.options}
    content = read_json(run.directory.analyses / f"{analysis.name}.json")
    if content and all(content["made"].get(key) == value for key, value in wanted.items() if key != "notes"):
        return analysis.result_type.from_dict(content["result"])
    return analysis.measure_and_write(run)
