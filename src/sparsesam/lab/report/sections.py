"""The sections of the page: the results of a task, its analyses, and all runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from sparsesam.lab.display import (
    Axis,
    Cell,
    Figure,
    Number,
    Series,
    SeriesStyle,
    Table,
    cells,
    number_cell,
    percent,
    side_by_side,
)
from sparsesam.lab.display.figure import needs_log
from sparsesam.lab.experiment.config import unused
from sparsesam.lab.experiment.variants import confidence_interval, mean_curve, results_table
from sparsesam.lab.inspection import ANALYSES, Analysis, LabeledResult
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.tasks import ReportData, RunVariant, Task, differing_settings, label_of, show_setting

_PROVENANCE = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")
#: Measures of each epoch and their names.
_CURVES = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
}


def results_part(task: Task) -> Part:
    costs, (sentence, chosen) = task.costs, task.verdict
    ring = " The ring marks the cheapest variant not significantly different from the best." if chosen else ""
    words = {"time": "time of a run", "passes": "forward-backward passes"}[costs.measure]
    points = [point for variant in task.variants for point in _point(variant, costs.values[variant], chosen)]
    caption = f"{costs.explanation} Up and to the left is better.{ring}"
    figure = _against("cost", f"{words} / {costs.reference}’s", caption, points)
    blocks: list[Table | Figure] = [figure, results_table(task.variants, costs), _settings(task)]
    return Part("", blocks, sentence)


def _against(name: str, axis: str, caption: str, points: Sequence[Series], levels: Sequence[Series] = ()) -> Figure:
    """Returns the figure of test accuracies against something; ``levels`` are reference lines."""
    caption = f"{caption} Points that would hide each other are drawn side by side."
    x, y, panels = Axis(axis), Axis("test accuracy (%)"), {"": [*levels, *side_by_side(points)]}
    return Figure(f"accuracy-against-{name}", f"Test accuracy against {name}", caption, x, y, panels, "points")


def _point(variant: RunVariant, place: Number, chosen: RunVariant | None = None) -> list[Series]:
    """Returns the point of a variant with its interval; nothing if a value is not known."""
    if place is None or variant.accuracy is None:
        return []
    interval = confidence_interval([100 * value for value in variant.accuracies.values()], 100.0)
    x, y, bars = [place], [100 * variant.accuracy], interval and [interval]
    return [variant.style.series(variant.label, x, y, bars=bars, chosen=variant is chosen)]


def _settings(task: Task) -> Table:
    """Returns the settings in which the variants differ, "–" where a variant does not use one."""
    names, rows = differing_settings([variant.config for variant in task.variants]), []
    for variant in task.variants if names else ():
        without = unused(variant.config)
        shown = ["–" if name in without else show_setting(getattr(variant.config, name)) for name in names]
        rows.append(cells(variant.label, *shown))
    caption = "The settings in which the variants differ. A click on a run, below, shows all of its settings."
    return Table("variants", caption, ["variant", *names], rows)


def sparsity_part(task: Task) -> Part:
    """Accuracy against the share of unperturbed weights; empty for fewer than two sparsities."""
    reached = {sparsity for variant in task.variants if (sparsity := variant.mean("sparsity")) is not None}
    if len(reached) < 2:
        return Part("")
    levels = [
        variant.style.series(variant.label, [0, max(reached)], [100 * variant.accuracy] * 2, faint=True)
        for variant in task.variants
        if variant.config.is_plain and variant.accuracy is not None
    ]
    points = [point for variant in task.variants for point in _point(variant, variant.mean("sparsity"))]
    caption = "The actual sparsity of the masks; 0 is SAM. Dotted: no perturbation."
    return Part("Sparsity", [_against("sparsity", "share of weights not perturbed", caption, points, levels)])


def curves_part(task: Task) -> Part:
    """Losses and accuracies of each epoch: the mean of a variant's finished runs, and each unfinished run."""
    figures = []
    for measure, words in _CURVES.items():
        is_share = measure.endswith("accuracy")
        factor, highest, unit = (100, 100.0, " (%)") if is_share else (1, math.inf, "")
        series = []
        for variant in task.variants:
            curves = {run: {x: factor * y for x, y in run.curve(measure).items()} for run in variant.runs}
            if finished := [curves[run] for run in variant.finished if curves[run]]:
                series.append(mean_curve(variant.style, variant.label, finished, highest=highest))
            for run, curve in curves.items():
                if run.status != "finished" and len(curve) > 1:
                    name = f"{label_of(variant, run, variant.runs)} ({run.status})"
                    series.append(variant.style.series(name, curve, curve.values(), faint=True))
        log = not is_share and needs_log(value for curve in series for value in curve.y)
        x, y = Axis("epoch", whole=True), Axis(words + unit, log=log)
        caption = "Means over the finished seeds; dotted: unfinished runs."
        figures.append(Figure(measure.replace("_", "-"), words.capitalize(), caption, x, y, {"": series}))
    return Part("Training curves", figures)


def analysis_parts(data: ReportData, task: Task | None) -> list[Part]:
    """Returns a part for each analysis of the task's runs, or of directories without a run; without results empty."""
    parts = []
    for analysis in ANALYSES.values():
        blocks: list[Table | Figure] = []
        everything: list[LabeledResult[Any]] = []
        for name in analysis.files:
            if results := _read_results(data, analysis, name, task):
                blocks += [analysis.table(name, results), *analysis.figures(name, results)]
                everything += results
        parts.append(Part(analysis.title, blocks, notes=analysis.notes(everything)))
    return parts


def _read_results(
    data: ReportData, analysis: type[Analysis[Any]], name: str, task: Task | None
) -> list[LabeledResult[Any]]:
    """Read the results of an analysis; those in another format are noted as problems."""
    found = []
    for run, label, style in _labeled(data, task, name):
        try:
            found.append(LabeledResult(label, analysis.result_type.from_dict(run.analyses[name]["result"]), style))
        except ValueError as error:
            problem = f"analyses/{name}.json is not in the format of docs/analyze.md: {error}"
            data.problems.append((str(run.path), problem))
    return found


def _labeled(data: ReportData, task: Task | None, name: str) -> Iterator[tuple[RunRecord, str, SeriesStyle]]:
    """Yield the runs that have a result of this name, with labels and styles."""
    if task is None:
        runs = [run for run in data.directories if run.config is None and name in run.analyses]
        yield from ((run, run.path.name, SeriesStyle()) for run in runs)
        return
    for variant in task.variants:
        having = [run for run in variant.runs if name in run.analyses]
        for place, run in enumerate(having):
            style = variant.style._replace(variant=variant.style.variant + len(task.variants) * place)
            yield run, label_of(variant, run, having), style


def runs_part(data: ReportData) -> Part:
    variants = [variant for task in data.tasks for variant in task.variants]
    names = {run: variant.label for variant in variants for run in sorted(variant.runs, key=lambda run: run.seed or 0)}
    names |= {run: "not counted" for run in data.runs if run not in names}
    columns = ["directory", "test accuracy", "variant", "seed", "status", "epochs", "training time (s)"]
    root = os.path.commonpath([run.path.absolute().parent for run in names]) if names else ""
    paths = {run: os.path.relpath(run.path, root) for run in names}
    caption = (
        f"Below {root}; a click on a run shows its settings. Unfinished runs have the accuracy of their last epoch, "
        "which is not included in any mean. Of runs with the same settings and seed, one is counted."
    )
    rows = [_row(run, paths[run], label) for run, label in names.items()]
    notes = [f"{run.status} {path}: {run.reason}" for run, path in paths.items() if run.status != "finished"]
    return Part("", [Table("runs", caption, columns, rows)], notes=notes)


def _row(run: RunRecord, name: str, label: str) -> list[Cell]:
    accuracies = [*run.curve("test_accuracy").values(), run.measured("test_accuracy")]
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    planned = "?" if run.config is None else run.config.epochs
    settings = "\n".join(f"{key}: {show_setting(value)}" for key, value in run.settings.items())
    return cells(
        Cell(name, details=settings),
        number_cell(known[-1] if known else None, percent),
        label,
        run.seed,
        Cell(run.status, status=run.status),
        Cell(f"{len(run.epochs)} of {planned}", order=len(run.epochs)),
        sum(run.curve("seconds").values()) if run.epochs else None,
    )


def machines_table(data: ReportData) -> Table:
    known = [run.provenance for run in data.directories if run.provenance]
    texts = [tuple(show_setting(provenance.get(name, "–")) for name in _PROVENANCE) for provenance in known]
    rows = [cells(*values, count) for values, count in Counter(texts).items()]
    caption = "+changes after a commit: the working tree had uncommitted changes."
    return Table("machines", caption, [*_PROVENANCE, "runs"], rows)
