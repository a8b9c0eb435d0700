"""How to install an extra: the end of messages about missing packages."""

from __future__ import annotations

__all__ = ["how_to_install"]


def how_to_install(extra: str) -> str:
    """Return how to install an extra. PyPI has no release, so the command is for a clone."""
    return f"install the extra {extra} (in a clone: pip install '.[{extra}]')"
