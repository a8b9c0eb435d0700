"""Cache systems over NumPy arrays; independent of the compiled layer."""

from __future__ import annotations

from pykvcache.arrays.flat import FlatKVCache

__all__ = ["FlatKVCache"]
