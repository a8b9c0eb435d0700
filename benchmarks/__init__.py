"""Side by side with C and with other bindings, on the same work: ``python -m benchmarks``."""
