"""How much of a test a run takes: all in `make test-all`, a quarter in `make test`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "some"]


def examples(n: int) -> int:
    """Scale the number of examples of `make test-all` by the profile; at least one."""
    return max(1, n * settings().max_examples // 100)


def some(names: Iterable[str], *usual: str) -> list[Any]:
    """Mark all parameters but the usual ones as slow."""
    return [n if n in usual else pytest.param(n, marks=pytest.mark.slow) for n in names]
