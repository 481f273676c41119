"""The answer of a task: accuracy against cost, with the recommended variant, and against sparsity; all numbers."""

from __future__ import annotations

from sparsesam.lab.display import Axis, Bar, Cell, Figure, Series, Table, cells, finished_of, number_cell
from sparsesam.lab.display.numbers import Number, percent, plural, ratio, significant
from sparsesam.lab.experiment.confidence import confidence_interval
from sparsesam.lab.report.cost import Recommendation, VariantCosts, recommend
from sparsesam.lab.report.data import Part, ReportData
from sparsesam.lab.report.variants import Task, Variant, differing_settings


def results_part(data: ReportData, task: Task) -> Part:
    cost = data.cost_of(task)
    recommendation = recommend(task, cost)
    return Part(
        title="",
        lead=recommendation.sentence if recommendation else "",
        blocks=[_cost_figure(task, cost, recommendation), _table(task, cost)],
        notes=_notes(task),
    )


def overview_parts(data: ReportData) -> list[Part]:
    """With several tasks, the answer of each in one row."""
    if len(data.tasks) < 2:
        return []
    rows = []
    for task in data.tasks:
        cost = data.cost_of(task)
        recommendation = recommend(task, cost)
        known = [variant for variant in task.variants if variant.accuracy is not None]
        shown = recommendation.chosen if recommendation else max(known, key=lambda one: one.accuracy or 0, default=None)
        if shown is not None:
            accuracy = Cell(shown.accuracy_text, order=shown.accuracy)
            costs = Cell(cost.show(shown), order=cost.values[shown])
            rows.append(cells(task.label, accuracy, shown.label, costs, number_cell(len(known))))
    caption = (
        "For each task the best choice: the cheapest variant without a significant difference to the best. "
        "Mean ± standard deviation over seeds."
    )
    columns = ["task", "test accuracy", "variant", "cost", "variants"]
    return [Part("", [Table("overview", caption, columns, rows)])]


def _accuracy_bar(variant: Variant) -> list[Bar] | None:
    """The 95 % interval of the mean accuracy in percent; None for fewer than three seeds."""
    values = [100 * one for one in variant.by_seed("test_accuracy").values()]
    interval = confidence_interval(values, lowest=0.0, highest=100.0) if len(values) > 2 else None
    return None if interval is None else [interval]


def _cost_figure(task: Task, cost: VariantCosts, recommendation: Recommendation | None) -> Figure:
    chosen = recommendation.chosen if recommendation else None
    series = [_point(variant, cost.values[variant], variant is chosen) for variant in task.variants]
    return Figure(
        name="accuracy-against-cost",
        title="Test accuracy against cost",
        caption=f"{cost.explanation} Up and to the left is better. Bars are 95 % confidence intervals of the mean, "
        "from three seeds on; the ring marks the cheapest variant without a significant difference to the best.",
        kind="points",
        x=Axis(cost.axis),
        y=Axis("test accuracy (%)"),
        panels={"": [one for one in series if one is not None]},
    )


def _point(variant: Variant, place: Number, recommended: bool) -> Series | None:
    if place is None or variant.accuracy is None:
        return None
    mark = "best choice" if recommended else ""
    return variant.style.series(
        variant.label, [place], [100 * variant.accuracy], bars=_accuracy_bar(variant), mark=mark
    )


def _table(task: Task, cost: VariantCosts) -> Table:
    columns = ["variant", "test accuracy", cost.column, "sparsity", "best epoch’s", "train accuracy", "seeds"]
    caption = (
        "Mean ± standard deviation over the finished seeds, in the last epoch. “Best epoch’s” is the mean accuracy of "
        f"the epochs that best.pt was chosen from{_chosen_on(task)}."
    )
    return Table("accuracy", caption, columns, [_row(variant, cost) for variant in task.variants])


def _chosen_on(task: Task) -> str:
    chosen = {str(run.result.get("best_chosen_on", "test")) for run in task.runs if run.result}
    if chosen == {"val"}:
        return ", by validation images"
    by_test = "by the test images themselves, which makes it too high"
    if "val" in chosen:
        return f", by validation images in runs that have them, in the others {by_test}"
    return f", {by_test}" if chosen else ""


def _row(variant: Variant, cost: VariantCosts) -> list[Cell]:
    measures = ("best_test_accuracy", "train_accuracy", "sparsity")
    best, train, sparsity = (variant.mean(measure) for measure in measures)
    finished, failed = len(variant.finished), sum(run.status == "failed" for run in variant.runs)
    return cells(
        variant.label,
        Cell(variant.accuracy_text, order=variant.accuracy),
        number_cell(cost.values[variant], ratio),
        number_cell(sparsity, significant),
        number_cell(best, percent),
        number_cell(train, percent),
        Cell(finished_of(finished, len(variant.runs), failed), order=finished),
    )


def _notes(task: Task) -> list[str]:
    notes = []
    few = sum(0 < len(variant.finished) < 3 for variant in task.variants)
    if few:
        notes.append(f"{plural(few, 'variant')} with fewer than three finished seeds: differences may be chance.")
    duplicates = sum(len(variant.duplicates) for variant in task.variants)
    if duplicates:
        notes.append(f"{plural(duplicates, 'run')} with the settings and the seed of another: counted once.")
    names = [name.replace("_", " ") for name in differing_settings([variant.config for variant in task.variants])]
    return [*notes, f"Settings that differ: {', '.join(names)}."] if names else notes


def sparsity_part(task: Task) -> Part:
    """Accuracy against the share of weights left unperturbed; only where at least two sparsities were reached."""
    reached = {sparsity for variant in task.variants if (sparsity := variant.mean("sparsity")) is not None}
    if len(reached) < 2:
        return Part("")
    levels = [
        variant.style.series(variant.label, [0, max(reached)], [100 * variant.accuracy] * 2, faint=True)
        for variant in task.variants
        if variant.config.is_plain and variant.accuracy is not None
    ]
    points = [_point(variant, variant.mean("sparsity"), recommended=False) for variant in task.variants]
    figure = Figure(
        name="accuracy-against-sparsity",
        title="Test accuracy against sparsity",
        caption="The sparsity that the masks reached; 0 is SAM. Dotted: nothing is perturbed. Bars as above.",
        kind="points",
        x=Axis("share of weights not perturbed"),
        y=Axis("test accuracy (%)"),
        panels={"": [*levels, *(one for one in points if one is not None)]},
    )
    return Part("Accuracy against sparsity", [figure])
