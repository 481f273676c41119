"""``sparsesam sweep``: a grid of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import joblib
import yaml
from rich.console import Console
from rich.table import Table

from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.display import plural
from sparsesam.lab.experiment.calibration import SweepCalibration, calibrate, read_calibration
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.setting_types import NonNegativeInt, PositiveInt
from sparsesam.lab.experiment.sweep import Job, read_sweep, sweep_jobs
from sparsesam.lab.experiment.sweep_table import SweepProgress, sweep_table

HELP = (
    "Train every combination of settings in a YAML file, times seeds. Finished runs are not run again; an interrupted "
    "sweep continues with the same command. `sparsesam sweep demo` comes with the package and takes two minutes."
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", type=str, help="YAML with settings, variants, grid and seeds; or demo")
    add_execution(parser)
    parser.add_argument("--seeds", type=PositiveInt | None, default=None, help="number of seeds instead of the file's")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the variants' times first")


def add_execution(parser: Parser) -> None:
    """Options for running many runs, wherever they come from."""
    parser.add_argument("--out", type=Path | None, default=None, help="directory of the runs; default runs/NAME")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of all runs")
    parser.add_argument(
        "--jobs", type=PositiveInt | None, default=None, help="runs at a time; default one per core or GPU"
    )
    parser.add_argument("--gpus", type=NonNegativeInt, default=0, help="GPUs of this machine to spread the runs over")
    parser.add_argument("--backend", type=Literal["loky", "ray"], default="loky", help="processes, or a Ray cluster")
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    parser.add_argument("--data-dir", type=Path | None, default=None, help="where the data set's files are")


def run(options: Namespace) -> None:
    environment = _environment(options)
    sweep = read_sweep(options.file, overrides=overrides(options.set), seeds=options.seeds)
    out = options.out or Path("runs") / Path(options.file).stem
    jobs = sweep.jobs(out)
    calibration = None if options.no_calibration else _calibration(jobs, environment, out)
    execute(jobs, options, lambda: sweep_table(sweep.title, jobs, calibration), calibration=calibration)
    print(f"runs: {out}")
    report_failures(jobs)


def execute(
    jobs: Sequence[Job],
    options: Namespace,
    draw: Callable[[], Table],
    *,
    timed: Sequence[Job] = (),
    calibration: SweepCalibration | None = None,
) -> None:
    """Run what is not finished, with a table that ``draw`` makes from the runs' directories.

    The ``timed`` among the jobs come last, one at a time, and record the time of each step.
    """
    workers = options.jobs or options.gpus or joblib.cpu_count()
    environment, console = _environment(options), Console(highlight=False)
    progress = SweepProgress(jobs, draw, console, workers=workers, calibration=calibration)
    start = partial(sweep_jobs, backend=options.backend, retry=options.retry, gpus=options.gpus, on_end=progress.ended)
    try:
        with progress.shown():
            start([job for job in jobs if job not in timed], environment, workers=workers)
            start(timed, replace(environment, record_times=True), workers=1)
    except KeyboardInterrupt:
        done = sum(job.is_finished for job in jobs)
        raise Interrupted(f"{done} of {plural(len(jobs), 'run')} finished; the same command continues") from None


def _environment(options: Namespace) -> RunEnvironment:
    return RunEnvironment(data_dir=options.data_dir, accelerator="cuda" if options.gpus else "auto")


def _calibration(jobs: Sequence[Job], environment: RunEnvironment, out: Path) -> SweepCalibration:
    """The one that is there, or a new one; measuring also checks every variant before anything is trained."""
    known = read_calibration(out)
    if known is not None and known.fits([job.config for job in jobs]):
        return known
    console = Console(stderr=True)
    with console.status("measuring the time of a step of every variant …") if console.is_terminal else nullcontext():
        return calibrate(jobs, environment, out)


def report_failures(jobs: Sequence[Job]) -> None:
    failed = {job.directory: failure for job in jobs if (failure := job.failure) is not None}
    for directory, failure in failed.items():
        print(f"failed: {directory}: {failure}")
    if failed:
        raise RunError(f"{len(failed)} of {plural(len(jobs), 'run')} failed; --retry runs what failed again")


def overrides(given: Sequence[str]) -> dict[str, Any]:
    """``epochs=3`` as ``{"epochs": 3}``."""
    values = {}
    for one in given:
        name, found, value = one.partition("=")
        if not found:
            raise ValueError(f"--set must be NAME=VALUE, got {one!r}; for example --set epochs=3")
        values[name.replace("-", "_")] = yaml.safe_load(value)
    return values
