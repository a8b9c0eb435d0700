"""How many examples Hypothesis draws: few in the suite, 25 times as many in `make fuzz`."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(few: int) -> int:
    """Return the number of examples, for the profile that was chosen, where the suite has `few`."""
    return few * settings().max_examples // 100
