"""Losses and accuracies of each epoch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sparsesam.lab.display import Axis, Figure, Series, error_bars
from sparsesam.lab.report.data import Part
from sparsesam.lab.report.variants import Task, Variant

_MEASURES = {
    "test_accuracy": "test accuracy",
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
}


#: If a loss is this many times the median somewhere, the axis is logarithmic: the rest would be flat.
_WIDE_RANGE = 100


def curves_part(task: Task) -> Part:
    figures = []
    for measure, words in _MEASURES.items():
        is_share = measure.endswith("accuracy")
        series = [one for variant in task.variants for one in _curves(variant, measure, 100.0 if is_share else None)]
        values = [value for one in series for value in one.y]
        log = not is_share and min(values, default=0) > 0 and max(values) > _WIDE_RANGE * statistics.median(values)
        figures.append(
            Figure(
                name=measure.replace("_", "-"),
                title=words.capitalize(),
                caption=_caption(series),
                x=Axis("epoch", whole=True),
                y=Axis(f"{words} (%)" if is_share else words, log=log),
                panels={"": series},
            )
        )
    return Part("Training curves", figures)


def _caption(series: Sequence[Series]) -> str:
    mean = "Mean over the finished seeds, with ± one standard deviation." if any(one.bars for one in series) else ""
    return f"{mean}{' Dotted: runs that are not finished.' if any(one.faint for one in series) else ''}".strip()


def _curves(variant: Variant, measure: str, percent: float | None) -> list[Series]:
    """The mean of the finished runs, and each run that is not finished."""
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
