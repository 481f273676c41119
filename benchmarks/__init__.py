"""Benchmarks of time and memory: ``python -m benchmarks`` lists them."""
