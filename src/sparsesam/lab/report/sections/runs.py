"""Every run, and at the end those that are not finished."""

from __future__ import annotations

import os

from sparsesam.lab.display.numbers import number, percent, plural, significant
from sparsesam.lab.display.table import Cell, Table, cells, number_cell
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.section import Part, Section


def all_runs(data: ReportData) -> Section:
    shown = [run for run in data.runs if run.status != "analyses only"]
    labels = {run: variant.label for task in data.tasks for variant in task.variants for run in variant.runs}
    duplicates = {run: variant.label for task in data.tasks for variant in task.variants for run in variant.duplicates}
    root = _common_directory(shown)
    rows = []
    for run in shown:
        label = labels.get(run) or (f"{duplicates[run]}, not counted twice" if run in duplicates else "?")
        rows.append(_row(run, os.path.relpath(run.path, root), label))
    columns = ["directory", "test accuracy", "variant", "seed", "status", "epochs", "training time (s)"]
    caption = f"All runs below {root}. The accuracy of a run that is not finished is that of its last epoch."
    table = Table("runs", caption, columns, rows, text_columns=("variant", "status"))
    return Section("runs", "Runs", [Part("", [table])] if rows else [])


def not_finished(data: ReportData) -> Section:
    """Failures last: their accuracies are in no mean."""
    shown, runs = data.not_finished(), [run for run in data.runs if run.status != "analyses only"]
    root = _common_directory(runs)
    rows = [
        cells(os.path.relpath(run.path, root), Cell(run.status, status=run.status), run.reason or "–") for run in shown
    ]
    caption = f"{len(shown)} of {plural(len(runs), 'run')}; their accuracies are in no mean."
    table = Table("not-finished", caption, ["directory", "status", "reason"], rows, text_columns=("status", "reason"))
    return Section("unfinished", "Failed and unfinished", [Part("", [table])] if rows else [])


def _common_directory(runs: list[RunRecord]) -> str:
    return os.path.commonpath([run.path.absolute().parent for run in runs]) if runs else ""


def _row(run: RunRecord, name: str, label: str) -> list[Cell]:
    last = run.epochs[-1] if run.epochs else {}
    accuracy = run.measured("test_accuracy") if run.status == "finished" else number(last.get("test_accuracy"))
    seconds = sum(number(record.get("seconds")) or 0.0 for record in run.epochs) if run.epochs else None
    planned = run.settings.get("epochs", "?")
    return cells(
        name,
        number_cell(accuracy, percent),
        label,
        number_cell(number(run.settings.get("seed"))),
        Cell(run.status, status=run.status),
        Cell(f"{len(run.epochs)} of {planned}", order=len(run.epochs)),
        number_cell(seconds, significant),
    )
