"""Data, models, experiments, run inspection, the report and the command line, all built on the library."""
