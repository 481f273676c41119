"""How well a sweep uses the cores."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.runner import Session, benchmark
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.run import run_training
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Sweep, sweep_jobs

TRIAL = TrainConfig(optimizer="sgd", epochs=20, augment="none")


@benchmark(quick={"runs": 2, "seconds": 1})
def sweep(session: Session, *, runs: int = 8, cores: int = 2, seconds: int = 60) -> None:
    """How long do equal runs on several cores take, x the ideal: runs per core times one run alone?

    The workers' startup (importing torch) counts for the sweep but not for the run alone. The second ratio uses the
    times of the runs within the sweep: on a machine with other load, it still shows how long workers were idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        _seconds(TRIAL, out / "first")  # imports
        per_epoch = _seconds(TRIAL, out / "trial") / TRIAL.epochs
        config = replace(TRIAL, epochs=max(1, round(seconds / per_epoch)))
        alone = _seconds(config, out / "alone")
        jobs = Sweep("equal", {"run": config}, range(1, runs + 1)).jobs(out)
        start = time.perf_counter()
        sweep_jobs(jobs, RunEnvironment(), workers=cores)
        took = time.perf_counter() - start
        running = sum(_lasted(RunDirectory(job.directory)) for job in jobs)
    ideal = runs / cores * alone
    print(f"{runs} runs on {cores} cores: {took:.1f} s; one alone: {alone:.1f} s")
    print(f"{took / ideal:.3f} x the ideal {ideal:.1f} s")
    print(f"{took * cores / running:.3f} x the ideal of runs as slow as these ({running / runs:.1f} s)")


def _lasted(directory: RunDirectory) -> float:
    """Returns the time from the first file that a run writes to its last."""
    return directory.result.stat().st_mtime - directory.config.stat().st_mtime


def _seconds(config: TrainConfig, out: Path) -> float:
    start = time.perf_counter()
    run_training(config, RunEnvironment(out=out, threads=1, logger="none", quiet=True))
    return time.perf_counter() - start
