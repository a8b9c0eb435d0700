"""The contestants: each module runs in a separate process and environment, see ``worker.py``."""
