"""All runs, their machines, versions, commits and settings, and the unfinished ones."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from sparsesam.lab.display import Cell, Table, cells, number_cell, percent, plural
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.page import Part
from sparsesam.lab.report.read_run import RunRecord
from sparsesam.lab.report.variants import changed_settings, differing_settings, show_setting

_PROVENANCE = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")
#: Settings that are always shown.
_ALWAYS = ("dataset", "model", "base", "lr", "batch_size")


def runs_parts(data: ReportData) -> list[Part]:
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
    return [Part("", [Table("runs", caption, columns, rows)])]


def unfinished_parts(data: ReportData) -> list[Part]:
    """Returns the table of failed and unfinished runs."""
    shown, root = [run for run in data.runs if run.status != "finished"], _common_directory(data)
    rows = [
        cells(os.path.relpath(run.path, root), Cell(run.status, status=run.status), run.reason or "–") for run in shown
    ]
    caption = f"{len(shown)} of {plural(len(data.runs), 'run')}; not included in any mean accuracy."
    return [Part("", [Table("not-finished", caption, ["directory", "status", "reason"], rows)])]


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


def provenance_parts(data: ReportData) -> list[Part]:
    return [Part("", [_machines(data), _settings(data)])]


def _machines(data: ReportData) -> Table:
    known = [run.provenance for run in data.directories if run.provenance]
    counts = Counter(tuple(_text(provenance.get(name)) for name in _PROVENANCE) for provenance in known)
    rows = [cells(*(text.replace("+changes", " *") for text in texts), count) for texts, count in counts.items()]
    changed = any("+changes" in text for texts in counts for text in texts)
    caption = "* The working tree had uncommitted changes." if changed else ""
    return Table("origins", caption, [*_PROVENANCE, "runs"], rows)


def _settings(data: ReportData) -> Table:
    configs = [variant.config for task in data.tasks for variant in task.variants]
    varied = differing_settings(configs)
    shared = {name: getattr(configs[0], name) for name in _ALWAYS} | changed_settings(configs[0]) if configs else {}
    rows = [cells(name, _text(value)) for name, value in shared.items() if name not in varied]
    caption = "Settings shared by all runs; most defaults are left out."
    return Table("settings", caption, ["setting", "value"], rows)


def _text(value: Any) -> str:
    return "–" if value is None else show_setting(value)
