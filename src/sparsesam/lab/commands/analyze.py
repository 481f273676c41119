"""Analyze trained runs: print a table, and write RUN/analyses/NAME.json (docs/analyze.md)."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sparsesam.lab.commands.parser import Namespace, Parser, add_options, given_options
from sparsesam.lab.display import assign_styles, check_plot, to_rich, write_plot
from sparsesam.lab.inspection import ANALYSES, LabeledResult, TrainedRun
from sparsesam.lab.inspection.trained_run import EvalSettings


def add_arguments(parser: Parser) -> None:
    parser.usage = f"%(prog)s {{{','.join(ANALYSES)}}} RUN… [--OPTION VALUE …]"
    commands = parser.add_subparsers(dest="analysis", required=True, metavar="ANALYSIS", parser_class=Parser)
    for kind, analysis in ANALYSES.items():
        description = f"{analysis.help[0].upper()}{analysis.help[1:]}."
        command = commands.add_parser(
            kind, prog=f"sparsesam analyze {kind}", description=description, help=analysis.help
        )
        is_run = analysis.needs != "nothing"
        metavar, text = ("RUN", "directory of a run") if is_run else ("DIR", "directory for the result")
        command.add_argument("paths", type=Path, nargs="+", metavar=metavar, help=text)
        add_options(command, analysis, flags=True)
        if analysis.needs == "weights":
            add_options(command, EvalSettings, flags=True)
        command.add_argument("--plot", type=Path, help="also plot it to FILE.png, .svg or .pdf")


def run(options: Namespace) -> None:
    if options.plot is not None:
        check_plot(options.plot)
    kind, on = ANALYSES[options.analysis], EvalSettings(**given_options(options, EvalSettings))
    analysis = kind(**given_options(options, kind))
    analysis, runs, notes = analysis.prepare([TrainedRun(path, on) for path in options.paths])
    styles = assign_styles(["" if analysis.needs == "nothing" else run.config.optimizer for run in runs])
    results = []
    for run, style in zip(runs, styles, strict=True):  # each result is saved at once
        results.append(LabeledResult(str(run.path), analysis.measure_and_write(run), style))
    console = Console(highlight=False)
    console.print(to_rich(analysis.table(analysis.name, results), analysis.name, transposed=True))
    unrecorded = [f"{run.path}: {note}" for run in runs for note in analysis.origin(run).get("notes", ())]
    for note in (*notes, *unrecorded, *analysis.notes(results)):
        console.print(f"- {note}", markup=False)
    for run in runs:
        print(f"written: {run.path / 'analyses' / analysis.name}.json")
    if options.plot is not None:
        write_plot(analysis.figures(analysis.name, results), options.plot)
        print(f"plot: {options.plot}")
