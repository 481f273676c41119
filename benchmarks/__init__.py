"""Measurements of cost and memory; run with ``python -m benchmarks.<name>``."""
