"""How a value that is wrong stands in an error's text, whatever it is."""

from __future__ import annotations

import reprlib

__all__ = ["shown"]

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_MAX_BITS = 256  # of an integer that is written; Python refuses to write those of 4300 digits


def shown(value: object) -> str:
    """Return a value's text, of a long one the beginning and the end."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"<int of {value.bit_length()} bits>"
    try:
        return _SHORT.repr(value)
    except Exception:  # what it holds cannot be written
        return f"<{type(value).__name__}>"
