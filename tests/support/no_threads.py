"""A system that gives no more threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Let the system refuse every thread of Python's: the stack is as large as all addresses."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)
