"""Where the numbers come from: machines, versions, commits."""

from __future__ import annotations

import json
from typing import Any

from sparsesam.lab.report.names import show
from sparsesam.lab.report.section import ReportData, Section, Table, cells, value
from sparsesam.lab.report.variants import differing

_ORIGIN = ("cpu", "machine", "threads", "python", "torch", "numpy", "sparsesam", "commit")


def build(material: ReportData) -> Section:
    blocks = [table for table in (_origins(material), _settings(material)) if table.rows]
    return Section("provenance", "Where and how", "no run wrote down where it ran", blocks)


def _origins(material: ReportData) -> Table:
    counts: dict[str, int] = {}
    for run in material.runs:
        if run.provenance:
            origin = json.dumps([run.provenance.get(name) for name in _ORIGIN], default=str)
            counts[origin] = counts.get(origin, 0) + 1
    rows = [cells(*map(_text, json.loads(origin)), value(count, str(count))) for origin, count in counts.items()]
    caption = "A commit marked +changes had files that differed from it."
    return Table("origins", caption, [*_ORIGIN, "runs"], rows, words=_ORIGIN)


def _settings(material: ReportData) -> Table:
    varied = differing(material.variants)
    shared = material.variants[0].settings if material.variants else {}
    rows = [cells(name, _text(one)) for name, one in shared.items() if name not in (*varied, "seed")]
    return Table("settings", "Settings that all runs share.", ["setting", "value"], rows, words=("value",))


def _text(value: Any) -> str:
    return "–" if value is None else show(value)
