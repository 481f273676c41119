"""Where the result of an analysis is kept: ``analyses/NAME.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsesam.analysis import AnalysisResult
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_whole
from sparsesam.lab.inspection.origin import Origin


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
