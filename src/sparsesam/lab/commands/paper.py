"""``sparsesam paper``: the tables and figures of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.table import Table

from sparsesam.lab.commands.sweep import add_execution, execute, overrides, report_failures
from sparsesam.lab.experiment.paper import Recipe, Scale, default_out, finished_results, recipe, recipes, show_ours
from sparsesam.lab.experiment.sweep import Job

HELP = (
    "Repeat a table or figure of the paper. `list` names them, `show TABLE` tells what it runs and the paper's "
    "numbers, `run TABLE` trains it and prints ours beside theirs."
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", type=Literal["list", "show", "run"], help="what to do")
    parser.add_argument("table", type=str | None, nargs="?", default=None, help="its label in the paper")
    parser.add_argument(
        "--scale", type=Literal["laptop", "full"], default="laptop", help="minutes on digits, or the paper's own runs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each setting")
    add_execution(parser)


def run(options: Namespace) -> int:
    console = Console(highlight=False)
    if options.action == "list":
        console.print(_list())
        return 0
    if options.table is None:
        raise ValueError(f"`paper {options.action}` needs a table; `sparsesam paper list` names them")
    chosen, scale, settings = recipe(options.table), options.scale, overrides(options.set)
    out = options.out or default_out(chosen.label, scale)
    jobs = chosen.sweep(scale, range(options.seeds), settings).jobs(out)
    if options.action == "show":
        _show(chosen, scale, settings, jobs, console)
        return 0
    execute(jobs, options, lambda: comparison(chosen, scale, jobs, settings))
    print(f"runs: {out}")
    return report_failures(jobs)


def comparison(chosen: Recipe, scale: Scale, jobs: Sequence[Job], settings: Mapping[str, Any]) -> Table:
    """Ours, mean ± sample standard deviation over the seeds, and beside it the paper's."""
    columns, theirs = chosen.columns(scale), chosen.columns("full")
    seeds = len({job.config.seed for job in jobs})
    finished = finished_results(jobs)
    done = f"{sum(map(len, finished.values()))} of {len(jobs)} runs"
    trained = ", ".join(dict.fromkeys(f"{job.config.model} on {job.config.dataset}" for job in jobs))
    drawn = Table(title=chosen.title, caption=f"ours: {trained}; {scale} scale, {done}, {seeds} seed(s) each")
    drawn.add_column("")
    for column in columns:
        drawn.add_column(f"ours\n{column.label}", justify="right")
    for column in theirs:
        drawn.add_column(f"paper\n{column.label}", justify="right")
    for row in chosen.rows(scale):
        cells = [show_ours(chosen.cell(row, column, finished, settings), column.measure) for column in columns]
        numbers = [f"{number:.2f}" for number in chosen.paper(row)]
        drawn.add_row(row, *cells, *numbers, *["–"] * (len(theirs) - len(numbers)))
    return drawn


def _list() -> Table:
    drawn = Table()
    for heading in ("table", "", "runs per seed: laptop", "full"):
        drawn.add_column(heading)
    for label, one in recipes().items():
        counts = [str(len(one.sweep(scale, [0], {}).variants)) for scale in ("laptop", "full")]
        drawn.add_row(label, one.title, *counts)
    return drawn


def _show(chosen: Recipe, scale: Scale, settings: Mapping[str, Any], jobs: Sequence[Job], console: Console) -> None:
    """The settings that all runs share and those that differ, then the paper's numbers with what we have."""
    values = [asdict(job.config) for job in jobs]
    varied = [name for name in values[0] if len({str(one[name]) for one in values}) > 1]
    console.print(f"{chosen.title}\n\nall runs:")
    console.print("  " + ", ".join(f"{name} {value}" for name, value in values[0].items() if name not in varied))
    console.print(f"\ndiffering: {', '.join(varied)}\n")
    console.print(comparison(chosen, scale, jobs, settings))
