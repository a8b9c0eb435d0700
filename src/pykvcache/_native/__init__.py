"""The compiled layer: 1:1 with C, no defaults, no cleverness."""

from __future__ import annotations

import importlib


def _is_main_interpreter() -> bool:
    """Return whether this is the process's main interpreter; True if unknown."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from 3.13; up to 3.12
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() == module.get_main())
    return True


# Checked before the extension is loaded: after a failed import in a subinterpreter, the main
# interpreter could not load it either. lib.pyx checks again, without Python modules.
if not _is_main_interpreter():
    raise ImportError(
        "pykvcache cannot be used in a subinterpreter, only in the main one: llama.cpp's threads "
        "and this layer's hooks belong to the process. Use a process instead"
    )
