"""Write one self-contained HTML page about runs: accuracies, costs, curves, and the results of `sparsesam analyze`.

RUNS are directories of runs, or parent directories. Only records are read, never a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from sparsesam.lab.commands.parser import Namespace, Parser


def add_arguments(parser: Parser) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="directories of runs, or parent directories")
    text = "HTML file to write (default: report.html)"
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help=text)
    parser.add_argument("--title", type=str, help="title of the page; default the sweep's")
    parser.add_argument("--figures", type=Path, help="also write each figure as SVG and PDF to this directory")


def run(options: Namespace) -> None:
    from sparsesam.lab.report import write_report

    data = write_report(options.runs, options.out, title=options.title, figures=options.figures)
    print(f"{options.out}: {data.count()}")
