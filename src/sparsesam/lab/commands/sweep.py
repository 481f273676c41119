"""Train every combination of settings in a YAML file, for every seed, and show the progress.

Finished runs are not run again; the same command continues an interrupted sweep. `sparsesam sweep demo` is included and
takes two minutes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparsesam.lab.commands.parser import Namespace, Parser, add_options, given_options
from sparsesam.lab.display import plural, to_rich
from sparsesam.lab.experiment.calibration import SweepCalibration, calibrate, read_calibration
from sparsesam.lab.experiment.config import Machine, RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.observers import duration
from sparsesam.lab.experiment.setting_types import NonNegativeInt, PositiveInt, read_yaml
from sparsesam.lab.experiment.sweep import Job, read_sweep, sweep_jobs
from sparsesam.lab.experiment.variants import Variant, costs_of, grouped, results_table


def add_arguments(parser: Parser) -> None:
    parser.add_argument("file", type=str, help="YAML file with settings, variants, grid and seeds; or demo")
    add_execution(parser)
    parser.add_argument("--seeds", type=PositiveInt, help="number of seeds; overrides the file's")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure step times before the sweep")


def add_execution(parser: Parser) -> None:
    """Add the options shared by commands that run many runs."""
    text = "directory of the runs; default runs/NAME (paper: runs/paper/LABEL/SCALE)"
    parser.add_argument("--out", type=Path, help=text)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="override settings of all runs")
    parser.add_argument("--jobs", type=PositiveInt, help="number of parallel runs; default one per core or GPU")
    parser.add_argument("--gpus", type=NonNegativeInt, default=0, help="number of GPUs of this machine to use")
    text = "local processes or a Ray cluster"
    parser.add_argument("--backend", type=Literal["loky", "ray"], default="loky", help=text)
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    add_options(parser, Machine)


def run(options: Namespace) -> None:
    sweep = read_sweep(options.file, overrides=overrides(options.set), seeds=options.seeds)
    out = options.out or Path("runs") / Path(options.file).stem
    jobs = sweep.jobs(out)
    calibration = None if options.no_calibration else read_calibration(out)
    if not options.no_calibration and (calibration is None or not calibration.fits([job.config for job in jobs])):
        with Console(stderr=True).status("measuring the time of a step of every variant …"):
            calibration = calibrate(jobs, environment_of(options), out)  # checks every variant before training starts
    sweep.write(out)
    execute(jobs, options, lambda: sweep_table(sweep.title, jobs, calibration))
    print(f"runs: {out}")
    report_failures(jobs)


def execute(
    jobs: Sequence[Job], options: Namespace, draw: Callable[[], RenderableType], *, timed: Sequence[Job] = ()
) -> None:
    """Run the unfinished jobs and show the table that ``draw`` makes from the runs' directories.

    ``timed`` jobs run last, one at a time, and record the time of each step. In a terminal the table is drawn once a
    second; in a log it comes last, after a line per run.
    """
    import joblib

    distinct = list({job.directory: job for job in jobs}.values())
    console, warnings = Console(highlight=False), Counter[str]()
    begun, epochs = time.monotonic(), _epochs_left(distinct)

    def status() -> str:
        finished, left, remaining = sum(job.status == "finished" for job in distinct), _epochs_left(distinct), ""
        if 0 < left < epochs:
            seconds = left * (time.monotonic() - begun) / (epochs - left)
            remaining = f", about {duration(seconds)} remaining"
        return f"{finished} of {plural(len(distinct), 'run')} finished{remaining}"

    def view() -> RenderableType:
        texts = [f"warning ({plural(count, 'run')}): {text}" for text, count in warnings.items()]
        return Group(draw(), *map(Text, (status(), *texts)))

    def ended(job: Job, texts: Sequence[str]) -> None:
        warnings.update(texts)
        if console.is_terminal:
            return
        ending = "interrupted" if job.failure is None else f"failed: {job.failure}"
        if (result := job.result) is not None:
            ending = f"test {result.test_accuracy:.2%}, {duration(result.seconds)} of training"
        line = f"{job.label}, seed {job.seed}: {ending}; {status()}"
        console.print(line, soft_wrap=True, markup=False)

    workers, environment = options.jobs or options.gpus or joblib.cpu_count(), environment_of(options)
    start = partial(sweep_jobs, backend=options.backend, retry=options.retry, gpus=options.gpus, on_end=ended)
    try:
        with Live(get_renderable=view, console=console, refresh_per_second=1, redirect_stderr=False):
            start([job for job in jobs if job not in timed], environment, workers=workers)
            start(timed, replace(environment, record_times=True), workers=1)
        if not console.is_terminal:
            console.line()  # after the table, which ends without one in a log
    except KeyboardInterrupt:
        raise Interrupted(f"{status()}; run the same command to continue") from None


def environment_of(options: Namespace) -> RunEnvironment:
    return RunEnvironment(**{"accelerator": "cuda" if options.gpus else "auto", **given_options(options, Machine)})


def _epochs_left(jobs: Sequence[Job]) -> int:
    return sum(max(0, job.config.epochs - job.epochs_done) for job in jobs if job.status == "unfinished")


def report_failures(jobs: Sequence[Job]) -> None:
    failed = {job.directory: failure for job in jobs if (failure := job.failure) is not None}
    for directory, failure in failed.items():
        print(f"failed: {directory}: {failure}")
    if failed:
        raise RunError(f"{len(failed)} of {plural(len(jobs), 'run')} failed; --retry runs them again")


def overrides(given: Sequence[str]) -> dict[str, Any]:
    """Parse ``epochs=3`` to ``{"epochs": 3}``."""
    values = {}
    for text in given:
        name, found, value = text.partition("=")
        if not found:
            raise ValueError(f"--set must be NAME=VALUE, got {text!r}; for example --set epochs=3")
        try:
            values[name.replace("-", "_")] = read_yaml(value)
        except ValueError as error:
            raise ValueError(f"--set {name} must have a YAML value, got {value!r}: {error}") from error
    return values


def sweep_table(title: str, jobs: Sequence[Job], calibration: SweepCalibration | None = None) -> Table:
    groups = grouped(jobs, lambda job: job.label)
    variants = [Variant(label, members[0].config, members) for label, members in groups.items()]
    return to_rich(results_table(variants, costs_of(variants, [] if calibration is None else [calibration])), title)
