"""Facts about the build under test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pykvcache import system_info

SOURCES = Path(
    os.environ.get("LLAMA_CPP_SOURCE_DIR")
    or Path(__file__).resolve().parents[2] / "vendor" / "llama.cpp"
)
"""Of the llama.cpp that is built in; they may be missing."""

PLAIN = bool(system_info()["is_plain"])
"""Whether memories are changed by llama.cpp's own functions alone (``make test-plain``)."""


def fast_only(reason: str) -> pytest.MarkDecorator:
    """Skip where the fast paths are not built in: the reason says what llama.cpp does instead."""
    return pytest.mark.skipif(PLAIN, reason=f"the plain build: {reason}")
