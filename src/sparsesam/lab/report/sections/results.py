"""The results of a task: accuracy against cost with the recommended variant, all numbers, curves, and sparsity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsesam.lab.display import Axis, Cell, Figure, Series, Table, cells, number_cell, side_by_side
from sparsesam.lab.display.figure import needs_log
from sparsesam.lab.display.numbers import Number, percent, plural, ratio
from sparsesam.lab.experiment.confidence import confidence_interval
from sparsesam.lab.experiment.config import unused
from sparsesam.lab.experiment.variants import mean_curve
from sparsesam.lab.report.labels import differing_settings, show_setting
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.tasks import ReportData, RunVariant, Task, Verdict

#: Measures of each epoch and their names.
_CURVES = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
}


def overview_table(data: ReportData) -> Table:
    """Returns the best choice of each task; empty for a single task."""
    rows = []
    for task in data.tasks if len(data.tasks) > 1 else ():
        variants = sum(variant.accuracy is not None for variant in task.variants)
        for verdict in task.verdicts or [Verdict("–")]:
            found: list[str | Cell] = [verdict.sentence, "–", "–"]
            if chosen := verdict.chosen:
                cost = Cell(task.costs.show(chosen), order=task.costs.values[chosen])
                found = [chosen.label, Cell(chosen.accuracy_text, order=chosen.accuracy), cost]
            rows.append(cells(task.label, *found, variants))
    caption = "The best choice for each task: the cheapest variant not significantly different from the best."
    return Table("overview", caption, ["task", "best choice", "test accuracy", "cost", "variants"], rows)


def results_part(task: Task) -> Part:
    costs, chosen = task.costs, [verdict.chosen for verdict in task.verdicts if verdict.chosen]
    ring = " The ring marks the cheapest variant not significantly different from the best." if chosen else ""
    words = {"time": "time of a run", "passes": "forward-backward passes"}[costs.measure]
    points = [point for variant in task.variants for point in _point(variant, costs.values[variant], chosen)]
    caption = f"{costs.explanation} Up and to the left is better.{ring}"
    figure = _against("cost", f"{words} / {costs.reference}’s", caption, points)
    duplicates = sum(len(variant.duplicates) for variant in task.variants)
    note = f"{plural(duplicates, 'run')} with the same settings and seed as another: counted once."
    lead = "\n".join(verdict.sentence for verdict in task.verdicts)
    return Part("", [figure, _table(task), _settings(task)], lead, [note] if duplicates else [])


def _against(name: str, axis: str, caption: str, points: Sequence[Series], levels: Sequence[Series] = ()) -> Figure:
    """Returns the figure of test accuracies against something; ``levels`` are reference lines."""
    points = side_by_side(points)
    moved = " Points that would hide each other are drawn side by side." if any(point.shift for point in points) else ""
    x, y, panels = Axis(axis), Axis("test accuracy (%)"), {"": [*levels, *points]}
    return Figure(f"accuracy-against-{name}", f"Test accuracy against {name}", caption + moved, x, y, panels, "points")


def _point(variant: RunVariant, place: Number, chosen: Sequence[RunVariant] = ()) -> list[Series]:
    """Returns the point of a variant with its interval; nothing if a value is not known."""
    if place is None or variant.accuracy is None:
        return []
    interval = confidence_interval([100 * value for value in variant.accuracies.values()], lowest=0.0, highest=100.0)
    x, y, bars = [place], [100 * variant.accuracy], interval and [interval]
    return [variant.style.series(variant.label, x, y, bars=bars, chosen=variant in chosen)]


def _table(task: Task) -> Table:
    cost = f"{task.costs.measure} / {task.costs.reference}"
    budgets = {variant: variant.config.budget for variant in task.variants if variant.config.has_budget}
    budget_column = ["budget"] if budgets else []
    columns = ["variant", "test accuracy", cost, *budget_column, "sparsity", "best epoch *", "train accuracy", "seeds"]
    caption = (
        "Means over the finished seeds, in the last epoch. * Test accuracy of best.pt, which is chosen on validation "
        "images or, in runs without them, on the test images themselves, which makes it too high."
    )
    rows = [
        cells(
            variant.label,
            Cell(variant.accuracy_text, order=variant.accuracy),
            number_cell(task.costs.values[variant], ratio),
            *([budgets.get(variant)] if budgets else []),
            variant.mean("sparsity"),
            number_cell(variant.mean("best_test_accuracy"), percent),
            number_cell(variant.mean("train_accuracy"), percent),
            Cell(variant.seeds, order=len(variant.finished)),
        )
        for variant in task.variants
    ]
    return Table("accuracy", caption, columns, rows)


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
    mean = "Means over the finished seeds. " if any(len(variant.finished) > 1 for variant in task.variants) else ""
    for measure, words in _CURVES.items():
        is_share = measure.endswith("accuracy")
        series = []
        for variant in task.variants:
            curves = {
                run: {x: (100 if is_share else 1) * y for x, y in run.curve(measure).items()} for run in variant.runs
            }
            finished = [curve for run, curve in curves.items() if run.status == "finished" and curve]
            if finished:
                highest = 100.0 if is_share else math.inf
                series.append(mean_curve(variant.style, variant.label, finished, highest=highest))
            for run, curve in curves.items():
                if run.status != "finished" and len(curve) > 1:
                    name = f"{task.label_of(run, variant.runs)} ({run.status})"
                    series.append(variant.style.series(name, curve, curve.values(), faint=True))
        log = not is_share and needs_log(value for curve in series for value in curve.y)
        dotted = "Dotted: unfinished runs." if any(curve.faint for curve in series) else ""
        x, y = Axis("epoch", whole=True), Axis(f"{words} (%)" if is_share else words, log=log)
        name = measure.replace("_", "-")
        figures.append(Figure(name, words.capitalize(), f"{mean}{dotted}".strip(), x, y, {"": series}))
    return Part("Training curves", figures)
