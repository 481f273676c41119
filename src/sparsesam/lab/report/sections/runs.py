"""Every run, where and how they ran (machines, versions, commits, settings), and those that are not finished."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from sparsesam.lab.display import Cell, Table, cells, number, number_cell, percent, plural, significant
from sparsesam.lab.report.data import Part, ReportData, Section
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import changed_settings, differing_settings, show_setting

_ORIGIN = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")
#: Settings that are shown whatever their values.
_ALWAYS = ("dataset", "model", "base", "lr", "batch_size")


def runs_section(data: ReportData) -> Section:
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
    table = Table("runs", caption, columns, rows)
    return Section("runs", "Runs", [Part("", [table])] if rows else [])


def unfinished_section(data: ReportData) -> Section:
    """Failures last: their accuracies are in no mean."""
    shown, runs = data.not_finished(), [run for run in data.runs if run.status != "analyses only"]
    root = _common_directory(runs)
    rows = [
        cells(os.path.relpath(run.path, root), Cell(run.status, status=run.status), run.reason or "–") for run in shown
    ]
    caption = f"{len(shown)} of {plural(len(runs), 'run')}; their accuracies are in no mean."
    table = Table("not-finished", caption, ["directory", "status", "reason"], rows)
    return Section("unfinished", "Failed and unfinished", [Part("", [table])] if rows else [])


def _common_directory(runs: list[RunRecord]) -> str:
    return os.path.commonpath([run.path.absolute().parent for run in runs]) if runs else ""


def _row(run: RunRecord, name: str, label: str) -> list[Cell]:
    last = run.epochs[-1] if run.epochs else {}
    accuracy = run.measured("test_accuracy") if run.status == "finished" else number(last.get("test_accuracy"))
    seconds = sum(number(record.get("seconds")) or 0.0 for record in run.epochs) if run.epochs else None
    planned = "?" if run.config is None else run.config.epochs
    return cells(
        name,
        number_cell(accuracy, percent),
        label,
        number_cell(run.seed),
        Cell(run.status, status=run.status),
        Cell(f"{len(run.epochs)} of {planned}", order=len(run.epochs)),
        number_cell(seconds, significant),
    )


def provenance_section(data: ReportData) -> Section:
    tables = [table for table in (_origins(data), _settings(data)) if table.rows]
    return Section("provenance", "Where and how", [Part("", tables)] if tables else [])


def _origins(data: ReportData) -> Table:
    known = [run.provenance for run in data.runs if run.provenance]
    counts = Counter(tuple(_text(provenance.get(name)) for name in _ORIGIN) for provenance in known)
    rows = [cells(*origin, number_cell(count)) for origin, count in counts.items()]
    caption = "A commit marked +changes had files that differed from it."
    return Table("origins", caption, [*_ORIGIN, "runs"], rows)


def _settings(data: ReportData) -> Table:
    configs = [variant.config for task in data.tasks for variant in task.variants]
    varied = differing_settings(configs)
    shared = {name: getattr(configs[0], name) for name in _ALWAYS} | changed_settings(configs[0]) if configs else {}
    rows = [cells(name, _text(one)) for name, one in shared.items() if name not in varied]
    caption = "Settings that all runs share; those at their defaults are left out."
    return Table("settings", caption, ["setting", "value"], rows)


def _text(value: Any) -> str:
    return "–" if value is None else show_setting(value)
