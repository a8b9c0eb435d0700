"""The compiled layer: 1:1 with C, no defaults, no cleverness."""

from __future__ import annotations

import importlib


def _is_main_interpreter() -> bool:
    """Tell whether this is the process's first interpreter; True where that cannot be found out."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # from 3.13; up to 3.12
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        return bool(module.get_current() == module.get_main())
    return True


# Before the extension is loaded: a module that fails in a subinterpreter could not be loaded
# in the main one any more. lib.pyx asks again, without the help of a module of Python's.
if not _is_main_interpreter():
    raise ImportError(
        "pykvcache cannot be used in a subinterpreter, only in the main one: llama.cpp's threads "
        "and this layer's hooks belong to the process. Use a process instead"
    )
