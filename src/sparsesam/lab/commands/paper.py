"""Reproduce a table or figure of the paper.

`list` lists them, `show NAME` shows the runs and the source of each setting, `run NAME` trains them, prints our numbers
beside the paper's and draws the figures. NAME is a label of the paper (fig:hessian), another name (landscape) or a
number (table 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsesam.lab.commands.parser import Namespace, Parser
from sparsesam.lab.commands.sweep import add_execution, environment_of, execute, overrides, report_failures
from sparsesam.lab.display import check_plot
from sparsesam.lab.experiment.setting_types import PositiveFloat, PositiveInt
from sparsesam.lab.paper.choices import other_choices, settings_of
from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.dry_run import PAPER_TFLOPS, dry_run
from sparsesam.lab.paper.figures import draw_figure
from sparsesam.lab.paper.recipe import Scale, recipe, recipes


def add_arguments(parser: Parser) -> None:
    parser.add_argument("action", type=Literal["list", "show", "run"], help="what to do")
    parser.add_argument("name", type=str, nargs="?", help="name of a table or figure")
    text = "minutes on digits, or the paper's own runs"
    parser.add_argument("--scale", type=Literal["laptop", "full"], default="laptop", help=text)
    parser.add_argument("--seeds", type=PositiveInt, help="runs per setting; default 3, figures 1")
    parser.add_argument("--plot", type=Path, help="for figures: FILE.png, .svg or .pdf to draw to")
    parser.add_argument("--dry-run", action="store_true", help="build every run, take two steps, estimate the cost")
    text = "GPU speed in TFLOP/s for the dry run's GPU hours; default that of the paper's A100 by its table 10"
    parser.add_argument("--tflops", type=PositiveFloat, default=round(PAPER_TFLOPS, 1), help=text)
    add_execution(parser)


def run(options: Namespace) -> None:
    if options.action == "list":
        Console(highlight=False).print(_list())
        return
    if options.name is None:
        raise ValueError(f"`paper {options.action}` needs a table or figure; `sparsesam paper list` lists them")
    chosen = recipe(options.name).at(options.scale, overrides(options.set))
    chosen.check_overrides()
    out, seeds = options.out or chosen.directory, options.seeds or (3 if chosen.has_numbers else 1)
    runs = RecipeRuns(chosen, chosen.sweep(range(seeds)).jobs(out), environment_of(options).data_dir)
    if options.action == "show":
        _show(runs)
    elif options.dry_run:
        for line in dry_run(chosen, seeds=seeds, tflops=options.tflops):
            print(line, flush=True)
        counted = "a backward pass counts as two forward passes, a Hessian-vector product as two of both"
        print(f"Estimates, hours at {options.tflops:g} TFLOP/s (--tflops): {counted}.")
    else:
        _run(runs, options, out)


def _run(runs: RecipeRuns, options: Namespace, out: Path) -> None:
    chosen, jobs = runs.recipe, runs.jobs
    file = options.plot or (out / f"{chosen.label}.png" if chosen.figure else None)
    if file is not None:
        check_plot(file)
        if chosen.figure is None:
            raise ValueError(f"--plot must be left out: {chosen.label} is a table, not a figure")
    if jobs:
        timed = chosen.timed()
        execute(jobs, options, runs.table, timed=[job for job in jobs if job.config.variant in timed])
        _say_each(runs.sentences())
        print(f"runs: {out}")
        report_failures(jobs)
    if file is not None:
        _say_each(draw_figure(runs, file))
        print(f"figure: {file}")


def _say_each(sentences: Iterable[str]) -> None:
    """Print a list, wrapped between words."""
    for sentence in sentences:
        Console(highlight=False).print(Text(f"- {sentence}"))


def _list() -> Table:
    drawn = Table("", "name", "", "runs", box=SIMPLE_HEAD, caption="runs: per seed, at laptop and at full scale")
    for known in recipes().values():
        counts = " / ".join(str(len(known.at(scale).sweep([0]).variants)) for scale in get_args(Scale))
        drawn.add_row(known.place, known.label, known.title, counts)
    return drawn


def _show(runs: RecipeRuns) -> None:
    """Print notes, every setting and choice with its source, and the paper's numbers beside the finished runs'."""
    chosen, console = runs.recipe, Console(highlight=False)
    console.print(f"{chosen.place}: {chosen.title} ({chosen.label}, {chosen.scale} scale)", markup=False)
    _say_each(chosen.remarks)
    for heading, choices in {"setting": settings_of(chosen), "choice": other_choices(chosen)}.items():
        drawn = Table(heading, "value", "where it comes from")
        for choice in choices:
            drawn.add_row(choice.name, Text(", ".join(choice.values)), Text(choice.mark))
        if choices:
            console.print(drawn)
    if chosen.has_numbers:
        console.print(runs.table())
