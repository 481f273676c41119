"""Benchmarks of time and memory; run with ``python -m benchmarks.<name>``."""
