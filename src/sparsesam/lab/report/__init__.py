"""From the records of runs to one page that needs no network, and to figures for a paper.

Reads what runs and analyses wrote down (config.yaml, records.jsonl, result.json, failure.json, analyses/*.json), never
a checkpoint.

    write_report(["runs/demo"], "report.html", figures="figures")
"""

from sparsesam.lab.report.write import write_report

__all__ = ["write_report"]
