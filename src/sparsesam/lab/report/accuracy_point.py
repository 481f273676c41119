"""A variant as one point: its accuracy, with the spread over seeds, over something else."""

from __future__ import annotations

from sparsesam.lab.report.figure import Series
from sparsesam.lab.report.names import color_of
from sparsesam.lab.report.variants import Variant


def accuracy_at(place: float | None, variant: Variant) -> Series | None:
    """None for a variant without that number or without a finished run."""
    accuracy, spread = variant.accuracy, variant.spread("test_accuracy")
    if place is None or accuracy is None:
        return None
    return Series(
        name=variant.label,
        color=color_of(variant.optimizer),
        number=variant.number,
        x=[place],
        y=[100 * accuracy],
        error=None if spread is None else [100 * spread],
    )
