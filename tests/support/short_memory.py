"""Programs in which allocations fail, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__ = ["run_short_of_memory"]

_BEFORE = """
import _testcapi

def short(call, first, last):
    '''Call, while the interpreter gets no memory from one allocation on, to before another one.'''
    _testcapi.set_nomemory(first, last)
    try: return call()
    finally: _testcapi.remove_mem_hooks()
"""


def run_short_of_memory(code: str, **environment: str) -> None:
    """Run a program that may call ``short(call, first, last)``; it has to end well."""
    pytest.importorskip("_testcapi")
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
