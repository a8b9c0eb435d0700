"""Whether the tests run under AddressSanitizer (``make asan``)."""

from __future__ import annotations

import ctypes
import sys

SANITIZED = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "__asan_init")

SLOWER = 10 if SANITIZED else 1
"""How much longer a step may take before a process counts as stuck."""
