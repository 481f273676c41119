"""The file of a result, ``analyses/NAME.json``, and what the result was measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsesam.analysis import AnalysisResult
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_whole


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


def write_analysis(
    directory: Path, name: str, result: AnalysisResult, origin: Origin, *, options: Mapping[str, Any], seconds: float
) -> Path:
    """Write a result with its provenance to ``directory/analyses`` at once; docs/analyses.md has the format."""
    machine = provenance()
    made = {
        **origin.to_dict(),
        "options": dict(options),
        "seconds": seconds,
        "command": machine["command"],
        "provenance": machine,
    }
    content = {"analysis": name, "result": result.to_dict(), "made": made}
    file = directory / "analyses" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, allow_nan=False) + "\n")
    return file
