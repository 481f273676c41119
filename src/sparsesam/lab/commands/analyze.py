"""``sparsesam analyze``: what the trained weights of runs look like."""

from __future__ import annotations

import sys
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from rich import progress as rich
from rich.console import Console
from rich.table import Table

from sparsesam.lab.commands.parser import Parser
from sparsesam.lab.experiment.names import nearest
from sparsesam.lab.inspection import ANALYSES, MeasuredOn, load_run, write_analysis
from sparsesam.lab.inspection.base import Analysis, Progress, remarks
from sparsesam.lab.inspection.convergence import Convergence
from sparsesam.lab.inspection.options import options_of
from sparsesam.lab.inspection.pictures import check_plot, draw

HELP = "Look at trained runs: print a table, and write RUN/analyses/NAME.json (docs/analyses.md)."


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = f"%(prog)s {{{','.join(ANALYSES)}}} RUN… [--OPTION VALUE …]"
    kinds = parser.add_subcommands(dest="kind")
    for kind, analysis in ANALYSES.items():
        one = Parser(f"sparsesam analyze {kind}", f"{analysis.help[0].upper()}{analysis.help[1:]}.")
        _add_fields(one, analysis)
        if issubclass(analysis, Convergence):
            one.add_argument("--out", type=Path, required=True, help="directory of the result")
        else:
            one.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
            _add_fields(one, MeasuredOn)
        one.add_argument("--plot", type=Path | None, default=None, help="draw it, FILE.png, .svg or .pdf")
        kinds.add_subcommand(kind, one, help=analysis.help)
        one.prog = f"sparsesam analyze {kind}"  # it was given the usage of the whole command


def rewrite(arguments: list[str]) -> list[str]:
    """Only a check: argparse would answer an unknown kind with a list of all."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in ANALYSES:
        raise ValueError(f"unknown analysis {arguments[0]!r}; {nearest(arguments[0], ANALYSES)}")
    return arguments


def run(options: Namespace) -> int:
    kind: str = options.kind
    given: dict[str, Any] = options[kind].as_dict()
    if given["plot"] is not None:
        check_plot(given["plot"])
    analysis = _made_of(ANALYSES[kind], given)
    console = Console(highlight=False)
    if isinstance(analysis, Convergence):
        results = {given["out"]: _without_run(analysis, given["out"])}
    else:
        analysis, results = _of_runs(analysis, given["runs"], _made_of(MeasuredOn, given))
    console.print(_table(analysis, results))
    for remark in dict.fromkeys(remark for result in results.values() for remark in remarks(result)):
        console.print(f"- {remark}")
    for directory in results:
        console.print(f"written: {directory / 'analyses' / analysis.name}.json", soft_wrap=True)
    if given["plot"] is not None:
        draw(kind, {str(directory): result for directory, result in results.items()}, given["plot"])
        console.print(f"picture: {given['plot']}", soft_wrap=True)
    return 0


def _without_run(analysis: Convergence, out: Path) -> dict[str, Any]:
    start = time.perf_counter()
    with _bar(analysis.name) as progress:
        result = analysis.measure(None, progress)
    _write(out, analysis, result, analysis.made(None), time.perf_counter() - start)
    return result


def _of_runs(analysis: Analysis, paths: Sequence[Path], on: MeasuredOn) -> tuple[Analysis, dict[Path, dict[str, Any]]]:
    """Measure one run after the other, each result being written before the next begins."""
    settings = {name: getattr(on, name) for name in options_of(on)}
    analysis, runs = analysis.prepare([load_run(path, **settings) for path in paths])
    results = {}
    for one in runs:
        start = time.perf_counter()
        with _bar(f"{analysis.name} of {one.path}") as progress:
            result = analysis.measure(one, progress)
        _write(one.path, analysis, result, analysis.made(one), time.perf_counter() - start)
        results[one.path] = result
    return analysis, results


def _write(directory: Path, analysis: Analysis, result: dict[str, Any], made: dict[str, Any], seconds: float) -> None:
    made = {**made, "options": options_of(analysis), "seconds": seconds}
    write_analysis(directory, analysis.name, result, made)


@contextmanager
def _bar(title: str) -> Iterator[Progress]:
    """How far an analysis is, on a terminal; nothing elsewhere."""
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _table(analysis: Analysis, results: Mapping[Path, dict[str, Any]]) -> Table:
    drawn = Table(title=analysis.name)
    drawn.add_column("")
    for directory in results:
        drawn.add_column(str(directory), justify="right", overflow="fold")
    columns = [analysis.summary(result) for result in results.values()]
    for row in columns[0]:
        drawn.add_row(row, *(column[row] for column in columns))
    return drawn


def _add_fields(parser: ArgumentParser, kind: type) -> None:
    """An option for every field that has a help text."""
    hints = typing.get_type_hints(kind)
    for name, one in options_of(kind).items():
        flag, text = f"--{name.replace('_', '-')}", one.metadata["help"]
        if one.default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif one.metadata["nargs"]:
            parser.add_argument(flag, type=float, nargs=one.metadata["nargs"], default=one.default, help=text)
        else:
            parser.add_argument(flag, type=hints[name], default=one.default, help=text)


def _made_of(kind: Any, given: Mapping[str, Any]) -> Any:
    return kind(**{name: given[name] for name in options_of(kind) if name in given})
