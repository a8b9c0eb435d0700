"""What all tests of the cache in one process have in common."""

from __future__ import annotations

import pytest

from pykvcache.prefix import pieces


@pytest.fixture(autouse=True)
def share_small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the few bytes of a test model's cells pay for sharing them."""
    monkeypatch.setattr(pieces, "_LEAST_BYTES", 1)
    monkeypatch.setattr(pieces, "_LEAST_PART", 1 << 30)
    for name in ("_JOINED_BYTES", "_PART_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(pieces, name, 0)
