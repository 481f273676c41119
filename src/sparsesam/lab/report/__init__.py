"""Writes one offline HTML page about runs.

Reads the records of runs and analyses (config.yaml, records.jsonl, result.json, failure.json, analyses/*.json), never a
checkpoint.

    write_report(["runs/demo"], "report.html")
"""

from sparsesam.lab.report.write import write_report

__all__ = ["write_report"]
