"""Where a result comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparsesam.analysis import AnalysisResult


@dataclass(frozen=True)
class Origin(AnalysisResult):
    """The checkpoint and the images that a result was measured on; None for what does not apply.

    ``step`` counts the training steps before the checkpoint, ``mask_step`` is the step in which its mask was made.
    ``other`` is the directory of the second run of a line between two.
    """

    checkpoint: str | None = None
    step: int | None = None
    mask_step: int | None = None
    split: str | None = None
    samples: int | None = None
    seed: int | None = None
    loss: str | None = None
    statistics: str | None = None
    device: str | None = None
    other: str | None = None
    notes: list[str] = field(default_factory=list)
