"""Starting threads, where the system may refuse them."""

from __future__ import annotations

from threading import Thread

from pykvcache.errors import ThreadRefused

__all__ = ["has_started", "start"]


def has_started(thread: Thread) -> bool:
    """Start a thread; False where the system gives none: too many, or no memory for one."""
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        return False
    return True


def start(thread: Thread) -> None:
    """Start a thread that something cannot be done without."""
    if not has_started(thread):
        raise ThreadRefused(f"the system gives no thread for {thread.name}", thread.name)
