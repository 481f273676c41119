"""Every run, finished or not."""

from __future__ import annotations

import os

from sparsesam.lab.report.names import decimals, percent
from sparsesam.lab.report.numbers import number
from sparsesam.lab.report.read_run import Run
from sparsesam.lab.report.section import Cell, ReportData, Section, Table, cells, value


def build(material: ReportData) -> Section:
    labels = {run: variant.label for variant in material.variants for run in variant.runs}
    shown = [run for run in material.runs if run.status != "analyses only"]
    above = os.path.commonpath([run.path.absolute().parent for run in shown]) if shown else ""
    rows = [_row(run, os.path.relpath(run.path, above), labels.get(run, "?")) for run in shown]
    columns = ["directory", "variant", "seed", "status", "epochs", "test accuracy", "training time (s)", "reason"]
    caption = f"All runs that were found, below {above}. The accuracy of an unfinished run is that of its last epoch."
    table = Table("runs", caption, columns, rows, words=("variant", "status", "reason"))
    return Section("runs", "Runs", "no runs", [table] if rows else [])


def _row(run: Run, name: str, label: str) -> list[Cell]:
    last = run.epochs[-1] if run.epochs else {}
    accuracy = run.measured("test_accuracy") if run.status == "finished" else number(last.get("test_accuracy"))
    seconds = sum(number(record.get("seconds")) or 0.0 for record in run.epochs) if run.epochs else None
    seed, planned = number(run.settings.get("seed")), run.settings.get("epochs", "?")
    return cells(
        name,
        label,
        value(seed, "–" if seed is None else f"{seed:g}"),
        Cell(run.status, status=run.status),
        value(len(run.epochs), f"{len(run.epochs)} of {planned}"),
        value(accuracy, percent(accuracy)),
        value(seconds, decimals(seconds, 1)),
        run.reason,
    )
