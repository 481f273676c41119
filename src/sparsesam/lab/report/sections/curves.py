"""Losses and accuracies, epoch by epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import color_of
from sparsesam.lab.report.numbers import Number, number
from sparsesam.lab.report.read_run import Run
from sparsesam.lab.report.section import ReportData, Section
from sparsesam.lab.report.variants import Variant, by_task

_MEASURES = {
    "test_accuracy": ("Test accuracy", "test accuracy (%)", 100.0),
    "train_loss": ("Training loss", "training loss", 1.0),
    "test_loss": ("Test loss", "test loss", 1.0),
    "train_accuracy": ("Training accuracy", "training accuracy (%)", 100.0),
}


def build(material: ReportData) -> Section:
    figures = []
    for measure, (title, axis, factor) in _MEASURES.items():
        panels = {}
        for task, variants in by_task(material.variants).items():
            series = [one for variant in variants for one in _curves(variant, measure, factor)]
            if series:
                panels[task] = series
        if panels:
            caption = (
                "Mean over the finished seeds, the band ± one standard deviation; dotted: a run that is not finished."
            )
            figures.append(
                Figure(measure.replace("_", "-"), title, caption, "lines", Axis("epoch"), Axis(axis), panels)
            )
    return Section(
        name="curves",
        title="Training curves",
        hint="no epoch was recorded",
        blocks=figures,
    )


def _curves(variant: Variant, measure: str, factor: float) -> list[Series]:
    finished = _mean_curve(variant, measure, factor)
    others = [
        Series(
            name=f"{variant.name_of(run, variant.runs)} ({run.status})",
            color=color_of(variant.optimizer),
            number=variant.number,
            x=list(points),
            y=list(points.values()),
            faint=True,
        )
        for run in variant.runs
        if run.status != "finished" and (points := _points(run, measure, factor))
    ]
    return [*([finished] if finished else []), *others]


def _mean_curve(variant: Variant, measure: str, factor: float) -> Series | None:
    curves = [_points(run, measure, factor) for run in variant.finished]
    epochs = sorted({epoch for curve in curves for epoch in curve})
    if not epochs:
        return None
    values = [[curve[epoch] for curve in curves if epoch in curve] for epoch in epochs]
    return Series(
        name=variant.label,
        color=color_of(variant.optimizer),
        number=variant.number,
        x=epochs,
        y=[sum(one) / len(one) for one in values],
        error=[_deviation(one) for one in values] if len(curves) > 1 else None,
    )


def _points(run: Run, measure: str, factor: float) -> dict[float, float]:
    found = {}
    for record in run.epochs:
        epoch, value = number(record["epoch"]), number(record.get(measure))
        if epoch is not None and value is not None:
            found[epoch] = factor * value
    return found


def _deviation(values: Sequence[float]) -> Number:
    """As statistics.stdev, which is exact and a hundred times slower."""
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return math.sqrt(sum((one - mean) ** 2 for one in values) / (len(values) - 1))
