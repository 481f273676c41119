"""``sparsesam paper``: the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.commands.sweep import add_execution, execute, overrides, report_failures
from sparsesam.lab.display import check_plot, plural
from sparsesam.lab.experiment.sweep import Job
from sparsesam.lab.paper.choices import other_choices, settings_of
from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.cost import PAPER_TFLOPS
from sparsesam.lab.paper.dry_run import DryRun, cost_table, dry_run
from sparsesam.lab.paper.figures import TrainedRecipe, draw
from sparsesam.lab.paper.recipe import Recipe, Scale, recipe, recipes

HELP = (
    "Repeat a table or figure of the paper. `list` names them, `show NAME` tells what it runs and where each setting "
    "comes from, `run NAME` trains it, prints ours beside theirs, and draws the figures. NAME is a label of the paper "
    "(fig:hessian), another name (landscape) or a number (table 4)."
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", type=Literal["list", "show", "run"], help="what to do")
    parser.add_argument("name", type=str | None, nargs="?", default=None, help="of a table or figure")
    parser.add_argument(
        "--scale", type=Literal["laptop", "full"], default="laptop", help="minutes on digits, or the paper's own runs"
    )
    parser.add_argument("--seeds", type=int | None, default=None, help="runs of each setting; default 3, figures 1")
    parser.add_argument("--plot", type=Path | None, default=None, help="of a figure, FILE.png, .svg or .pdf")
    parser.add_argument("--dry-run", action="store_true", help="build every run, take two steps, and tell the cost")
    parser.add_argument(
        "--tflops", type=float, default=round(PAPER_TFLOPS, 1), help="operations a second for the dry run's GPU hours"
    )
    add_execution(parser)


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    if options.action == "list":
        console.print(_list())
        return 0
    if options.name is None:
        raise ValueError(f"`paper {options.action}` needs a table or figure; `sparsesam paper list` names them")
    chosen = recipe(options.name).at(options.scale, overrides(options.set))
    chosen.check_overrides()
    out = options.out or chosen.directory
    jobs = chosen.sweep(range(_seeds(chosen, options.seeds))).jobs(out)
    if options.action == "show":
        _show(chosen, jobs, console)
        return 0
    if options.dry_run:
        _dry_run(chosen, options, console)
        return 0
    file = None
    if chosen.figure is not None:
        file = options.plot or out / f"{chosen.label}.png"
        check_plot(file)
    elif options.plot is not None:
        raise ValueError(
            f"--plot must be left out: {chosen.label} is a table; `sparsesam paper list` names the figures"
        )
    _run(chosen, options, jobs, out, console)
    if file is not None:
        for sentence in draw(TrainedRecipe(chosen, jobs, options.data_dir), file):
            console.print(f"- {sentence}", soft_wrap=True, markup=False)
        console.print(f"picture: {file}", soft_wrap=True, markup=False)
    return 0


def _run(chosen: Recipe, options: Namespace, jobs: Sequence[Job], out: Path, console: Console) -> None:
    compared = RecipeRuns(chosen, jobs)
    if jobs:
        timed = chosen.timed()
        execute(jobs, options, compared.table, timed=[job for job in jobs if replace(job.config, seed=0) in timed])
        for sentence in compared.sentences():
            console.print(f"- {sentence}", soft_wrap=True, markup=False)
        console.print(f"runs: {out}", soft_wrap=True)
        report_failures(jobs)


def _dry_run(chosen: Recipe, options: Namespace, console: Console) -> None:
    if options.tflops <= 0:
        raise ValueError(f"--tflops must be positive, got {options.tflops}")

    def on_run(label: str, one: DryRun) -> None:
        done = plural(one.steps, "step") if one.steps else f"built, no steps: {one.reason}"
        console.print(f"{label}: {done}", soft_wrap=True, markup=False)

    found = dry_run(chosen, on_run)
    console.print(cost_table(chosen, found, seeds=_seeds(chosen, options.seeds), tflops=options.tflops))
    source = (
        ", what table 10 of the paper implies of its A100 (ResNet-18 with SAM, 13.60 s an epoch)"
        if options.tflops == round(PAPER_TFLOPS, 1)
        else ""
    )
    console.print(
        f"- Hours at {options.tflops:g} TFLOP/s{source}; --tflops states another. All numbers are estimates: a "
        "backward counts as two forwards, a Fisher information as one forward-backward of its samples.",
        soft_wrap=True,
        markup=False,
    )


def _seeds(chosen: Recipe, asked: int | None) -> int:
    if asked is None:
        return 3 if chosen.has_numbers else 1
    if asked < 1:
        raise ValueError(f"--seeds must be at least 1, got {asked}")
    return asked


def _list() -> Table:
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, caption="runs: for each seed, at laptop and at full scale")
    drawn.add_column("", no_wrap=True)
    drawn.add_column("name", no_wrap=True)
    drawn.add_column("")
    drawn.add_column("runs", no_wrap=True, justify="right")
    for one in recipes().values():
        counts = " / ".join(str(len(one.at(scale).sweep([0]).variants)) for scale in get_args(Scale))
        drawn.add_row(one.place, one.label, one.title, counts)
    return drawn


def _show(chosen: Recipe, jobs: Sequence[Job], console: Console) -> None:
    """Every setting and choice with where it comes from, then the paper's numbers with what we have."""
    console.print(f"{chosen.place}: {chosen.title} ({chosen.label}, {chosen.scale} scale)", markup=False)
    for note in chosen.remarks:
        console.print(f"- {note}", soft_wrap=True, markup=False)
    groups = {"setting": settings_of(chosen), "choice": other_choices(chosen)}
    for heading, choices in groups.items():
        drawn = Table(heading, "value", "where it comes from")
        for one in choices:
            drawn.add_row(one.name, Text(", ".join(one.values)), Text(str(one.mark)))
        if choices:
            console.print(drawn)
    if chosen.has_numbers:
        console.print(RecipeRuns(chosen, jobs).table())
