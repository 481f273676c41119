"""The results of a task: accuracy against cost with the recommended variant, all numbers, curves, and sparsity."""

from __future__ import annotations

import math
import statistics

from sparsesam.lab.display import Axis, Cell, Figure, Series, Table, cells, error_bars, finished_of, number_cell
from sparsesam.lab.display.figure import needs_log
from sparsesam.lab.display.numbers import Number, percent, plural, ratio
from sparsesam.lab.experiment.confidence import confidence_interval
from sparsesam.lab.report.data import ReportData, Task, VariantCosts
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.variants import Variant, differing_settings

#: Measures of each epoch and their names.
_CURVES = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
}


def overview_parts(data: ReportData) -> list[Part]:
    """Returns a table with the best choice of each task, if there are several tasks."""
    if len(data.tasks) < 2:
        return []
    rows = []
    for task in data.tasks:
        cost, recommendation = task.cost, task.recommendation
        known = [variant for variant in task.variants if variant.accuracy is not None]
        shown = recommendation.chosen if recommendation else max(known, key=lambda one: one.accuracy or 0, default=None)
        if shown is not None:
            accuracy = Cell(shown.accuracy_text, order=shown.accuracy)
            costs = Cell(cost.show(shown), order=cost.values[shown])
            rows.append(cells(task.label, accuracy, shown.label, costs, len(known)))
    caption = (
        "The best choice for each task: the cheapest variant not significantly different from the best. "
        "Mean ± standard deviation over seeds."
    )
    columns = ["task", "test accuracy", "variant", "cost", "variants"]
    return [Part("", [Table("overview", caption, columns, rows)])]


def results_part(task: Task) -> Part:
    cost, recommendation = task.cost, task.recommendation
    chosen = recommendation.chosen if recommendation else None
    figure = Figure(
        name="accuracy-against-cost",
        title="Test accuracy against cost",
        caption=f"{cost.explanation} Up and to the left is better. Bars are 95 % confidence intervals of the mean, "
        "from three seeds on; the ring marks the cheapest variant not significantly different from the best.",
        kind="points",
        x=Axis(cost.axis),
        y=Axis("test accuracy (%)"),
        panels={"": [one for variant in task.variants for one in _point(variant, cost.values[variant], chosen)]},
    )
    lead = recommendation.sentence if recommendation else ""
    return Part("", [figure, _table(task)], lead, _notes(task))


def _point(variant: Variant, place: Number, chosen: Variant | None = None) -> list[Series]:
    """Returns the point of a variant, with the 95 % interval from three seeds on; nothing if a value is not known."""
    if place is None or variant.accuracy is None:
        return []
    values = [100 * one for one in variant.by_seed("test_accuracy").values()]
    bars = [confidence_interval(values, lowest=0.0, highest=100.0)] if len(values) > 2 else None
    mark = "best choice" if variant is chosen else ""
    return [variant.style.series(variant.label, [place], [100 * variant.accuracy], bars=bars, mark=mark)]


def _table(task: Task) -> Table:
    cost = f"{task.cost.measure} / {task.cost.reference}"
    columns = ["variant", "test accuracy", cost, "sparsity", "best epoch’s", "train accuracy", "seeds"]
    caption = (
        "Mean ± standard deviation over the finished seeds, in the last epoch. “Best epoch’s” is the mean accuracy of "
        "best.pt, which is chosen on validation images or, in runs without them, on the test images themselves, which "
        "makes it too high."
    )
    return Table("accuracy", caption, columns, [_row(variant, task.cost) for variant in task.variants])


def _row(variant: Variant, cost: VariantCosts) -> list[Cell]:
    finished, failed = len(variant.finished), sum(run.status == "failed" for run in variant.runs)
    return cells(
        variant.label,
        Cell(variant.accuracy_text, order=variant.accuracy),
        number_cell(cost.values[variant], ratio),
        variant.mean("sparsity"),
        number_cell(variant.mean("best_test_accuracy"), percent),
        number_cell(variant.mean("train_accuracy"), percent),
        Cell(finished_of(finished, len(variant.runs), failed), order=finished),
    )


def _notes(task: Task) -> list[str]:
    notes = []
    few = sum(0 < len(variant.finished) < 3 for variant in task.variants)
    if few:
        notes.append(f"{plural(few, 'variant')} with fewer than three finished seeds: differences may be chance.")
    duplicates = sum(len(variant.duplicates) for variant in task.variants)
    if duplicates:
        notes.append(f"{plural(duplicates, 'run')} with the same settings and seed as another: counted once.")
    names = [name.replace("_", " ") for name in differing_settings([variant.config for variant in task.variants])]
    return [*notes, f"Settings that differ: {', '.join(names)}."] if names else notes


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
    figure = Figure(
        name="accuracy-against-sparsity",
        title="Test accuracy against sparsity",
        caption="The actual sparsity of the masks; 0 is SAM. Dotted: no perturbation. Bars as above.",
        kind="points",
        x=Axis("share of weights not perturbed"),
        y=Axis("test accuracy (%)"),
        panels={
            "": [*levels, *(one for variant in task.variants for one in _point(variant, variant.mean("sparsity")))]
        },
    )
    return Part("Accuracy against sparsity", [figure])


def curves_part(task: Task) -> Part:
    """Losses and accuracies of each epoch."""
    figures = []
    for measure, words in _CURVES.items():
        is_share = measure.endswith("accuracy")
        series = [one for variant in task.variants for one in _curves(variant, measure, 100.0 if is_share else None)]
        log = not is_share and needs_log(value for one in series for value in one.y)
        mean = (
            "Mean over the finished seeds, with ± one standard deviation. " if any(one.bars for one in series) else ""
        )
        dotted = "Dotted: unfinished runs." if any(one.faint for one in series) else ""
        y = Axis(f"{words} (%)" if is_share else words, log=log)
        x, name = Axis("epoch", whole=True), measure.replace("_", "-")
        figures.append(Figure(name, words.capitalize(), f"{mean}{dotted}".strip(), x, y, {"": series}))
    return Part("Training curves", figures)


def _curves(variant: Variant, measure: str, percent: float | None) -> list[Series]:
    """Returns the mean of the finished runs, and each unfinished run."""
    factor = percent or 1.0
    curves = {run: {epoch: factor * value for epoch, value in run.curve(measure).items()} for run in variant.runs}
    finished = [curves[run] for run in variant.finished]
    epochs = sorted({epoch for curve in finished for epoch in curve})
    values = [[curve[epoch] for curve in finished if epoch in curve] for epoch in epochs]
    means = [statistics.fmean(one) for one in values]
    deviations = [statistics.stdev(one) if len(one) > 1 else None for one in values]
    bars = error_bars(means, deviations, lowest=0.0, highest=percent or math.inf) if len(finished) > 1 else None
    mean = [variant.style.series(variant.label, epochs, means, bars=bars)] if epochs else []
    others = [
        variant.style.series(f"{variant.label_of(run, variant.runs)} ({run.status})", curve, curve.values(), faint=True)
        for run, curve in curves.items()
        if run.status != "finished" and len(curve) > 1
    ]
    return [*mean, *others]
