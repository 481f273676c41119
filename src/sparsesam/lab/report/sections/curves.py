"""Losses and accuracies of each epoch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from sparsesam.lab.display import Axis, Figure, Series, error_bars, number
from sparsesam.lab.report.data import Part
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import Task, Variant

_MEASURES = {
    "test_accuracy": ("Test accuracy", "test accuracy (%)", 100.0),
    "train_loss": ("Training loss", "training loss", 1.0),
    "test_loss": ("Test loss", "test loss", 1.0),
    "train_accuracy": ("Training accuracy", "training accuracy (%)", 100.0),
}


#: If a loss is this many times the median somewhere, the axis is logarithmic: the rest would be flat.
_WIDE_RANGE = 100


def curves_part(task: Task) -> Part:
    figures = []
    for measure, (title, axis, factor) in _MEASURES.items():
        series = [one for variant in task.variants for one in _curves(variant, measure, factor)]
        values = [value for one in series for value in one.y]
        log = factor == 1.0 and bool(values) and 0 < _WIDE_RANGE * statistics.median(values) < max(values)
        figures.append(
            Figure(
                name=measure.replace("_", "-"),
                title=title,
                caption=_caption(series),
                x=Axis("epoch", whole=True),
                y=Axis(axis, log=log and min(values) > 0),
                panels={"": series},
            )
        )
    return Part("Training curves", figures)


def _caption(series: Sequence[Series]) -> str:
    mean = "Mean over the finished seeds, with ± one standard deviation." if any(one.bars for one in series) else ""
    return f"{mean}{' Dotted: runs that are not finished.' if any(one.faint for one in series) else ''}".strip()


def _curves(variant: Variant, measure: str, factor: float) -> list[Series]:
    finished = _mean_curve(variant, measure, factor)
    others = [
        variant.style.series(
            f"{variant.label_of(run, variant.runs)} ({run.status})", points, points.values(), faint=True
        )
        for run in variant.runs
        if run.status != "finished" and len(points := _points(run, measure, factor)) > 1
    ]
    return [*([finished] if finished else []), *others]


def _mean_curve(variant: Variant, measure: str, factor: float) -> Series | None:
    curves = [_points(run, measure, factor) for run in variant.finished]
    epochs = sorted({epoch for curve in curves for epoch in curve})
    if not epochs:
        return None
    values = [[curve[epoch] for curve in curves if epoch in curve] for epoch in epochs]
    means, highest = [sum(one) / len(one) for one in values], factor if factor > 1 else math.inf
    deviations = [statistics.stdev(one) if len(one) > 1 else None for one in values]
    bars = error_bars(means, deviations, lowest=0.0, highest=highest) if len(curves) > 1 else None
    return variant.style.series(variant.label, epochs, means, bars=bars)


def _points(run: RunRecord, measure: str, factor: float) -> dict[float, float]:
    points = {}
    for record in run.epochs:
        epoch, value = number(record["epoch"]), number(record.get(measure))
        if epoch is not None and value is not None:
            points[epoch] = factor * value
    return points
