"""Where the numbers come from: machines, versions, commits, settings."""

from __future__ import annotations

import json
from typing import Any

from sparsesam.lab.display.table import Table, cells, number_cell
from sparsesam.lab.report.data import ReportData
from sparsesam.lab.report.names import show_setting
from sparsesam.lab.report.section import Part, Section
from sparsesam.lab.report.variants import DEFAULTS, differing_settings

_ORIGIN = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")


#: Shown whatever their values.
_ALWAYS = ("dataset", "model", "base", "lr", "batch_size")


def provenance(data: ReportData) -> Section:
    tables = [table for table in (_origins(data), _settings(data)) if table.rows]
    return Section("provenance", "Where and how", [Part("", tables)] if tables else [])


def _origins(data: ReportData) -> Table:
    counts: dict[str, int] = {}
    for run in data.runs:
        if run.provenance:
            origin = json.dumps([run.provenance.get(name) for name in _ORIGIN], default=str)
            counts[origin] = counts.get(origin, 0) + 1
    rows = [cells(*map(_text, json.loads(origin)), number_cell(count)) for origin, count in counts.items()]
    caption = "A commit marked +changes had files that differed from it."
    return Table("origins", caption, [*_ORIGIN, "runs"], rows, text_columns=_ORIGIN)


def _settings(data: ReportData) -> Table:
    variants = [variant for task in data.tasks for variant in task.variants]
    varied = differing_settings(variants)
    shared = variants[0].settings if variants else {}
    rows = [
        cells(name, _text(one))
        for name, one in shared.items()
        if name not in (*varied, "seed") and (name in _ALWAYS or one != DEFAULTS.get(name))
    ]
    caption = "Settings that all runs share; those at their defaults are left out."
    return Table("settings", caption, ["setting", "value"], rows, text_columns=("value",))


def _text(value: Any) -> str:
    return "–" if value is None else show_setting(value)
