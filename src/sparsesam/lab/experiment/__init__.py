"""Training runs, sweeps, and their records."""

from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import append_records, read_masks, read_records

__all__ = ["append_records", "provenance", "read_masks", "read_records"]
