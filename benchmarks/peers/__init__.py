"""The contestants: each module runs in its own process and environment, see ``worker.py``."""
