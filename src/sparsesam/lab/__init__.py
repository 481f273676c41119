"""Data, models, experiments, run inspection, the report and the command line: everything that stands on the library."""
