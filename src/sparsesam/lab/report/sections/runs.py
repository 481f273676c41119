"""All runs with their settings, their machines, versions and commits, and the unfinished ones."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from sparsesam.lab.display import Cell, Table, cells, number_cell, percent, plural
from sparsesam.lab.report.labels import show_setting
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.tasks import ReportData

_PROVENANCE = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")
#: Marks a commit whose working tree had changes.
CHANGED = " *"


def runs_table(data: ReportData) -> Table:
    names: dict[RunRecord, str] = {}
    for variant in (variant for task in data.tasks for variant in task.variants):
        names |= dict.fromkeys(sorted(variant.runs, key=lambda run: run.seed or 0), variant.label)
        names |= dict.fromkeys(variant.duplicates, f"{variant.label}, not counted twice")
    names |= dict.fromkeys((run for run in data.runs if run not in names), "?")
    columns = ["directory", "test accuracy", "variant", "seed", "status", "epochs", "training time (s)"]
    root = _common_directory(data)
    caption = (
        f"Below {root}; a click on a run shows its settings. Unfinished runs have the accuracy of their last epoch."
    )
    rows = [_row(run, os.path.relpath(run.path, root), label) for run, label in names.items()]
    return Table("runs", caption, columns, rows)


def unfinished_table(data: ReportData) -> Table:
    """Returns the failed and unfinished runs."""
    shown, root = [run for run in data.runs if run.status != "finished"], _common_directory(data)
    rows = [
        cells(os.path.relpath(run.path, root), Cell(run.status, status=run.status), run.reason or "–") for run in shown
    ]
    caption = f"{len(shown)} of {plural(len(data.runs), 'run')}; not included in any mean accuracy."
    return Table("not-finished", caption, ["directory", "status", "reason"], rows)


def _common_directory(data: ReportData) -> str:
    return os.path.commonpath([run.path.absolute().parent for run in data.runs]) if data.runs else ""


def _row(run: RunRecord, name: str, label: str) -> list[Cell]:
    accuracies = [*run.curve("test_accuracy").values(), run.measured("test_accuracy")]
    known = [accuracy for accuracy in accuracies if accuracy is not None]
    planned = "?" if run.config is None else run.config.epochs
    settings = "\n".join(f"{key}: {show_setting(value)}" for key, value in run.settings.items())
    return cells(
        Cell(name, details=settings),
        number_cell(known[-1] if known else None, percent),
        label,
        run.seed,
        Cell(run.status, status=run.status),
        Cell(f"{len(run.epochs)} of {planned}", order=len(run.epochs)),
        sum(run.curve("seconds").values()) if run.epochs else None,
    )


def machines_table(data: ReportData) -> Table:
    known = [run.provenance for run in data.directories if run.provenance]
    texts = [tuple(_text(provenance.get(name)) for name in _PROVENANCE) for provenance in known]
    rows = [cells(*values, count) for values, count in Counter(texts).items()]
    changed = any(CHANGED in values[-1] for values in texts)
    caption = f"{CHANGED.strip()} The working tree had uncommitted changes." if changed else ""
    return Table("machines", caption, [*_PROVENANCE, "runs"], rows)


def _text(value: Any) -> str:
    return "–" if value is None else show_setting(value).replace("+changes", CHANGED)
