"""Accuracy against the share of weights left unperturbed."""

from __future__ import annotations

from sparsesam.lab.experiment.config import PLAIN
from sparsesam.lab.report.accuracy_point import accuracy_at
from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import color_of
from sparsesam.lab.report.section import ReportData, Section
from sparsesam.lab.report.variants import Variant, by_task


def build(material: ReportData) -> Section:
    panels = {}
    for task, variants in by_task(material.variants).items():
        masked = [one for variant in variants if (one := accuracy_at(variant.mean("sparsity"), variant)) is not None]
        reached = [one.x[0] for one in masked]
        if len(set(reached)) > 1:
            plain = [one for variant in variants if (one := _level(variant, max(reached))) is not None]
            panels[task] = [*plain, *masked]
    figure = Figure(
        name="accuracy-against-sparsity",
        title="Test accuracy over sparsity",
        caption="The sparsity the masks reached; 0 is SAM, and at 1 nothing is perturbed: the dotted line.",
        kind="points",
        x=Axis("share of weights not perturbed"),
        y=Axis("test accuracy (%)"),
        panels=panels,
    )
    return Section(
        name="sparsity",
        title="Accuracy against sparsity",
        hint="runs of at least two sparsities, for example a sweep with grid: {sparsity: [0.5, 0.8, 0.9]}",
        blocks=[figure] if panels else [],
    )


def _level(variant: Variant, right: float) -> Series | None:
    if variant.optimizer not in PLAIN or variant.accuracy is None:
        return None
    height = 100 * variant.accuracy
    return Series(variant.label, color_of(variant.optimizer), [0, right], [height, height], variant.number, faint=True)
