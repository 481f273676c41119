"""What the figures show of trained runs: each analysis is made once, and kept in ``RUN/analyses``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparsesam.lab.inspection import Analysis, TrainedRun, load_run, write_analysis
from sparsesam.lab.inspection.gradients import GradientAnalysis
from sparsesam.lab.inspection.hessian import HessianAnalysis
from sparsesam.lab.inspection.landscape import LandscapeAnalysis
from sparsesam.lab.inspection.options import options_of

Result = dict[str, Any]
#: Training images that landscapes and spectra are measured on, unless the recipe says another number.
SAMPLES = 2048


def gradients(directory: Path, options: Mapping[str, Any], data_dir: Path | None) -> Result:
    """r of SAM's and SGD's gradient of one batch as training sees it: of its size, normalized by itself."""
    config = load_run(directory).config
    size = config.batch_size
    run = load_run(directory, samples=size, batch_size=size, statistics="batch", data_dir=data_dir)
    return _kept(run, GradientAnalysis(rho=config.rho, **options))


def landscape(directory: Path, options: Mapping[str, Any], data_dir: Path | None) -> Result:
    """The training loss on points x points places of [-1, 1]² along filter-normalized random directions."""
    run, rest = _run_and_options(directory, options, data_dir)
    return _kept(run, LandscapeAnalysis(**{"points": 50, **rest}))


def hessian(directory: Path, options: Mapping[str, Any], data_dir: Path | None) -> Result:
    """The five largest eigenvalues, trace and spectral density of the Hessian of the training loss, by Lanczos."""
    run, rest = _run_and_options(directory, options, data_dir)
    return _kept(run, HessianAnalysis(**rest))


def _run_and_options(
    directory: Path, options: Mapping[str, Any], data_dir: Path | None
) -> tuple[TrainedRun, dict[str, Any]]:
    rest = dict(options)
    return load_run(directory, samples=rest.pop("samples", SAMPLES), data_dir=data_dir), rest


def _kept(run: TrainedRun, analysis: Analysis[Any]) -> Result:
    """From the run's file, if that is of these weights, images and options; else measured and written."""
    wanted = {**analysis.origin(run).to_dict(), "options": options_of(analysis)}
    file = run.path / "analyses" / f"{analysis.name}.json"
    if file.exists():
        content = json.loads(file.read_text())
        if all(content["made"].get(key) == value for key, value in wanted.items() if key != "notes"):
            return dict(content["result"])
    start = time.perf_counter()
    result = analysis.measure(run, lambda done, total: None)
    seconds = time.perf_counter() - start
    write_analysis(run.path, analysis.name, result, analysis.origin(run), options=options_of(analysis), seconds=seconds)
    # Read back: numbers that JSON does not have are null, whether or not the file was there before.
    return dict(json.loads(file.read_text())["result"])
