"""``sparsesam sweep``: train a grid of runs and show its progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sparsesam.lab.commands.parser import Namespace, Parser, add_options
from sparsesam.lab.display import plural, ratio, significant
from sparsesam.lab.experiment.calibration import SweepCalibration, calibrate, read_calibration
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.observers import duration
from sparsesam.lab.experiment.setting_types import NonNegativeInt, PositiveInt, read_yaml
from sparsesam.lab.experiment.sweep import Job, read_sweep, sweep_jobs
from sparsesam.lab.experiment.variants import Variant, costs_of, grouped

HELP = (
    "Train every combination of settings in a YAML file, for every seed. Finished runs are not run again; the same "
    "command continues an interrupted sweep. `sparsesam sweep demo` is included and takes two minutes."
)


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
    backends, text = Literal["loky", "ray"], "local processes or a Ray cluster"
    parser.add_argument("--backend", type=backends, default="loky", help=text)
    parser.add_argument("--retry", action="store_true", help="run failed runs again")
    add_options(parser, RunEnvironment, only=["data_dir"])


def run(options: Namespace) -> None:
    sweep = read_sweep(options.file, overrides=overrides(options.set), seeds=options.seeds)
    out = options.out or Path("runs") / Path(options.file).stem
    jobs = sweep.jobs(out)
    calibration = None if options.no_calibration else _calibration(jobs, _environment(options), out)
    sweep.write(out)
    execute(jobs, options, lambda: sweep_table(sweep.title, jobs, calibration))
    print(f"runs: {out}")
    report_failures(jobs)


def execute(
    jobs: Sequence[Job], options: Namespace, draw: Callable[[], RenderableType], *, timed: Sequence[Job] = ()
) -> None:
    """Run the unfinished jobs and show the table that ``draw`` makes from the runs' directories.

    ``timed`` jobs run last, one at a time, and record the time of each step.
    """
    import joblib

    workers = options.jobs or options.gpus or joblib.cpu_count()
    environment, progress = _environment(options), SweepProgress(jobs, draw)
    start = partial(sweep_jobs, backend=options.backend, retry=options.retry, gpus=options.gpus, on_end=progress.ended)
    try:
        with progress.shown():
            start([job for job in jobs if job not in timed], environment, workers=workers)
            start(timed, replace(environment, record_times=True), workers=1)
    except KeyboardInterrupt:
        done = sum(job.is_finished for job in jobs)
        raise Interrupted(f"{done} of {plural(len(jobs), 'run')} finished; run the same command to continue") from None


def _environment(options: Namespace) -> RunEnvironment:
    return RunEnvironment(data_dir=options.data_dir, accelerator="cuda" if options.gpus else "auto")


def _calibration(jobs: Sequence[Job], environment: RunEnvironment, out: Path) -> SweepCalibration:
    """Read the existing calibration or measure a new one, which also checks every variant before training starts."""
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


class SweepProgress:
    """Shows the progress of a sweep: the table that ``draw`` makes in a terminal, one line per run in a log.

    Both include the remaining time, from the number of epochs so far.
    """

    def __init__(self, jobs: Sequence[Job], draw: Callable[[], RenderableType]) -> None:
        self.jobs, self.draw = list({job.directory: job for job in jobs}.values()), draw
        self.console = Console(highlight=False)
        self.warnings: Counter[str] = Counter()
        self.begun, self.epochs_before = time.monotonic(), self._epochs_left()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw the table once a second while the block runs; in a log, once at the end."""
        if self.console.is_terminal:
            with Live(get_renderable=self._view, console=self.console, refresh_per_second=1, redirect_stderr=False):
                yield
            return
        try:
            yield
        finally:
            self.console.print(self._view(), soft_wrap=True)

    def ended(self, job: Job, warnings: Sequence[str]) -> None:
        """Called when a run ends: collect its warnings and, in a log, print a line."""
        self.warnings.update(warnings)
        if self.console.is_terminal:
            return
        ending = "interrupted" if job.failure is None else f"failed: {job.failure}"
        if (result := job.result) is not None:
            ending = f"test {result.test_accuracy:.2%}, {duration(result.seconds)} of training"
        line = f"{job.label}, seed {job.config.seed}: {ending}; {self._status()}"
        self.console.print(line, soft_wrap=True, markup=False)

    def _view(self) -> RenderableType:
        warnings = [f"warning ({plural(count, 'run')}): {text}" for text, count in self.warnings.items()]
        return Group(self.draw(), *map(Text, (self._status(), *warnings)))

    def _status(self) -> str:
        finished, left = sum(job.is_finished for job in self.jobs), self._epochs_left()
        done, remaining = self.epochs_before - left, ""
        if done and left:
            remaining = f", about {duration(left * (time.monotonic() - self.begun) / done)} remaining"
        return f"{finished} of {plural(len(self.jobs), 'run')} finished{remaining}"

    def _epochs_left(self) -> int:
        left = [job for job in self.jobs if job.status == "unfinished"]
        return sum(max(0, job.config.epochs - job.epochs_done) for job in left)


def sweep_table(title: str, jobs: Sequence[Job], calibration: SweepCalibration | None = None) -> Table:
    """Returns a table with a row per variant: means over its finished seeds, and its cost.

    Where a variant has a budget, the passes per step that were counted are beside it.
    """
    groups = grouped(jobs, lambda job: job.label)
    variants = [Variant(label, members[0].config, members) for label, members in groups.items()]
    cost = costs_of(variants, [] if calibration is None else [calibration])
    has_budget = any(variant.config.has_budget for variant in variants)
    table = Table(title=title, caption="±: 95 % interval of the mean, from three seeds on")
    budget_heading = ["passes / budget"] if has_budget else []
    for heading in ("", "test accuracy", f"{cost.measure} / {cost.reference}", *budget_heading, "sparsity", "seeds"):
        table.add_column(heading, justify="right" if heading else "left", overflow="fold")
    for variant in variants:
        passes = ratio(variant.mean("forward_backwards_per_step"))
        running = [f"in epoch {job.epochs_done + 1}/{job.config.epochs}" for job in variant.runs if job.is_running]
        table.add_row(
            variant.label,
            variant.accuracy_text,
            ratio(cost.values[variant]),
            *([f"{passes} / {significant(variant.config.budget)}"] if has_budget else []),
            significant(variant.mean("sparsity")),
            ", ".join([variant.seeds, *running]),
        )
    return table
