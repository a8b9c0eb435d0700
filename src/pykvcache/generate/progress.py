"""A progress bar for many requests, where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager

__all__ = ["watching"]


@contextmanager
def watching(requests: Sized, progress: bool | None) -> Iterator[Callable[[], None]]:
    """Give a function that shows how many requests have ended."""
    # A process may have no stderr: then it is None.
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        if progress:
            raise ImportError('a progress bar needs rich: pip install "pykvcache[cli]"') from None
        yield lambda: None
        return
    with Progress(console=Console(stderr=True)) as bar:
        first = len(requests)
        task = bar.add_task("requests", total=first)

        def look() -> None:
            bar.update(task, completed=max(0, first - len(requests)))

        yield look
