"""Cache systems over NumPy arrays; independent of the compiled layer."""
