"""``sparsesam report``: one page about many runs."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

HELP = (
    "Write one self-contained page about runs: accuracies, costs, curves, and whatever `sparsesam analyze` found. "
    "RUNS are their directories, or directories above them. Only records are read, never a checkpoint."
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("runs", type=str, nargs="+", help="directories of runs, or above them")
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--title", type=str, default="sparsesam report", help="of the page")
    parser.add_argument(
        "--figures", type=Path | None, default=None, help="directory for each figure as SVG and PDF, its data as CSV"
    )


def run(options: Namespace) -> int:
    from sparsesam.lab.experiment.provenance import provenance
    from sparsesam.lab.report import write_report
    from sparsesam.lab.report.page import count

    command = str(provenance()["command"])
    material = write_report(options.runs, options.out, title=options.title, figures=options.figures, command=command)
    print(f"{options.out}: {count(material.runs)}")
    return 0
