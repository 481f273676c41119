"""The accuracy of every variant, mean and standard deviation over its seeds."""

from __future__ import annotations

from sparsesam.lab.report.names import decimals, percent, plural
from sparsesam.lab.report.section import Cell, ReportData, Section, Table, cells, value
from sparsesam.lab.report.variants import Variant, by_task, differing


def build(material: ReportData) -> Section:
    several = len(by_task(material.variants)) > 1
    columns = ["variant", *(["task"] if several else []), "test accuracy", "best", "train accuracy"]
    columns += [f"time / {plain_name(material.variants)}", "sparsity", "seeds"]
    rows = [_row(variant, several) for variant in material.variants]
    caption = (
        "Mean ± sample standard deviation over the finished seeds, in the last epoch; “best” is the mean of each run’s "
        "best epoch, which looks at the test images. Times are medians of epochs, of training steps only."
    )
    table = Table("accuracy", caption, columns, rows, words=("task",))
    return Section(
        name="results",
        title="Results",
        hint="no run’s settings could be read",
        blocks=[table] if rows else [],
        notes=_notes(material.variants),
    )


def plain_name(variants: list[Variant]) -> str:
    """What times are relative to."""
    bases = {variant.settings["base"] for variant in variants}
    return "SGD" if bases <= {"sgd"} else "base optimizer"


def _row(variant: Variant, several: bool) -> list[Cell]:
    measures = ("test_accuracy", "best_test_accuracy", "train_accuracy", "sparsity")
    accuracy, best, train, sparsity = (variant.mean(measure) for measure in measures)
    return cells(
        variant.label,
        *([variant.task] if several else []),
        value(accuracy, percent(accuracy, variant.spread("test_accuracy"))),
        value(best, percent(best)),
        value(train, percent(train)),
        value(variant.relative_time, decimals(variant.relative_time)),
        value(sparsity, decimals(sparsity, 4)),
        value(len(variant.finished), _seeds(variant)),
    )


def _seeds(variant: Variant) -> str:
    finished, seeds = len(variant.finished), {run.settings.get("seed") for run in variant.finished}
    text = str(finished) if finished == len(variant.runs) else f"{finished} of {len(variant.runs)}"
    if len(seeds) < finished:
        text += f", {plural(len(seeds), 'seed')}"
    failed = sum(run.status == "failed" for run in variant.runs)
    return text + (f", {failed} failed" if failed else "")


def _notes(variants: list[Variant]) -> list[str]:
    if not variants:
        return []
    few = sum(0 < len(variant.finished) < 3 for variant in variants)
    notes = (
        [f"{plural(few, 'variant')} with fewer than three finished seeds: differences may be chance."] if few else []
    )
    names = [name.replace("_", " ") for name in differing(variants)]
    return [*notes, f"Differing settings: {', '.join(names)}."] if names else notes
