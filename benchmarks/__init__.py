"""Comparison with C and other bindings: ``python -m benchmarks``."""
