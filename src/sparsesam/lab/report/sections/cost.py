"""Accuracy against cost: the chart to decide by."""

from __future__ import annotations

from sparsesam.lab.report.accuracy_point import accuracy_at
from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.section import ReportData, Section
from sparsesam.lab.report.sections.results import plain_name
from sparsesam.lab.report.variants import Variant, by_task


def build(material: ReportData) -> Section:
    finished = [variant for variant in material.variants if variant.accuracy is not None]
    relative = any(variant.relative_time for variant in finished)
    panels = {}
    for task, variants in by_task(finished).items():
        series = [one for variant in variants if (one := _point(variant, relative)) is not None]
        if series:
            panels[task] = series
    plain = plain_name(material.variants)
    if relative:
        axis, caption = Axis(f"time of an epoch, times {plain}’s"), f"Up and to the left is better; {plain} is at 1."
        left_out = [variant.label for variant in finished if variant.relative_time is None]
        if left_out:
            caption += f" No {plain} run on the same machine to compare with, so not shown: {', '.join(left_out)}."
    else:
        axis = Axis("seconds per epoch")
        caption = "Up and to the left is better. No plain run of the same kind is here to give times relative to."
    figure = Figure(
        name="accuracy-against-cost",
        title="Test accuracy over time",
        caption=caption + " Bars are ± one standard deviation over seeds; times are medians.",
        kind="points",
        x=axis,
        y=Axis("test accuracy (%)"),
        panels=panels,
    )
    return Section(
        name="cost",
        title="Accuracy against cost",
        hint="no finished runs; sparsesam train or sparsesam sweep makes them",
        blocks=[figure] if panels else [],
    )


def _point(variant: Variant, relative: bool) -> Series | None:
    return accuracy_at(variant.relative_time if relative else variant.median("seconds_per_epoch"), variant)
