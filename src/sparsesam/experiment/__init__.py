"""Training runs and the records they leave."""

from sparsesam.experiment.demo import DemoConfig, DemoResult, run_demo
from sparsesam.experiment.provenance import provenance
from sparsesam.experiment.records import append_records, read_records

__all__ = ["DemoConfig", "DemoResult", "append_records", "provenance", "read_records", "run_demo"]
