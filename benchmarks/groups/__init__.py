"""The groups of measurements: one module each, with ``run(contestants, plan)``."""
