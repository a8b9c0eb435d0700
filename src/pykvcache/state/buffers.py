"""Any buffer as a vector of bytes, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvcache.errors import ArgumentError

__all__ = ["ByteArray", "as_bytes"]

ByteArray = npt.NDArray[np.uint8]


def as_bytes(buffer: Any, what: str, *, writable: bool = False, order: str = "") -> ByteArray:
    """View a C-contiguous buffer as bytes; `order` is the argument order shown in errors."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):  # NumPy's dates and times export no buffer
        hint = f": the order is {order}" if order else ""
        message = f"{what} must be a buffer of bytes, not {type(buffer).__name__}{hint}"
        raise TypeError(message) from None
    if "O" in view.format:
        raise TypeError(f"{what} holds Python objects, not bytes")
    if not view.c_contiguous:
        raise ArgumentError(f"{what} must be C-contiguous", what)
    if writable and view.readonly:
        raise ArgumentError(f"{what} is read-only", what)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    flat: npt.NDArray[Any] = np.frombuffer(view, np.uint8)
    return flat
