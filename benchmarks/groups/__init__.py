"""What is measured: one module per group, each with ``run(contestants, plan)``."""
