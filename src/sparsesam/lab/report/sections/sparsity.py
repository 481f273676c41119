"""Accuracy against the share of weights left unperturbed."""

from __future__ import annotations

from sparsesam.lab.display.figure import Axis, Figure, Series
from sparsesam.lab.experiment.config import PLAIN
from sparsesam.lab.report.section import Part
from sparsesam.lab.report.sections.results import accuracy_bar
from sparsesam.lab.report.variants import Task, Variant


def sparsity_part(task: Task) -> Part:
    """Only where at least two sparsities were reached."""
    masked = [one for variant in task.variants if (one := _point(variant)) is not None]
    reached = {one.x[0] for one in masked}
    if len(reached) < 2:
        return Part("")
    plain = [one for variant in task.variants if (one := _level(variant, max(reached))) is not None]
    figure = Figure(
        name="accuracy-against-sparsity",
        title="Test accuracy against sparsity",
        caption="The sparsity that the masks reached; 0 is SAM. Dotted: nothing is perturbed. Bars as above.",
        kind="points",
        x=Axis("share of weights not perturbed"),
        y=Axis("test accuracy (%)"),
        panels={"": [*plain, *masked]},
    )
    return Part("Accuracy against sparsity", [figure])


def _point(variant: Variant) -> Series | None:
    sparsity, accuracy = variant.mean("sparsity"), variant.accuracy
    if sparsity is None or accuracy is None:
        return None
    bars = accuracy_bar(variant)
    return Series(variant.label, variant.color, [sparsity], [100 * accuracy], variant.number, bars=bars)


def _level(variant: Variant, right: float) -> Series | None:
    if variant.optimizer not in PLAIN or variant.accuracy is None:
        return None
    height = 100 * variant.accuracy
    return Series(variant.label, variant.color, [0, right], [height, height], variant.number, faint=True)
