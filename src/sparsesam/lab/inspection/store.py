"""Where the result of an analysis is kept: ``analyses/NAME.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsesam.analysis.results import plain
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_whole

_NO_RUN = ("checkpoint", "step", "mask_step", "split", "samples", "seed", "loss", "statistics", "device")


def write_analysis(directory: Path, name: str, result: dict[str, Any], made: dict[str, Any]) -> Path:
    """Write a result with its provenance, all at once, to ``directory/analyses``; docs/analyses.md has the shape."""
    origin = provenance()
    made = {**dict.fromkeys(_NO_RUN), **made, "command": origin["command"], "provenance": origin}
    content = {"analysis": name, "result": result, "made": plain(made)}
    file = directory / "analyses" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(content, allow_nan=False) + "\n")
    return file
