"""A progress bar for many requests, if stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pykvcache.errors import how_to_install

__all__ = ["watching"]


@contextmanager
def watching(count: Callable[[], int], progress: bool | None) -> Iterator[Callable[[], None]]:
    """Yield a function that updates the bar; `count` returns the number of unfinished requests."""
    # sys.stderr is None in a process without one.
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False or (progress is None and not terminal):
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        if progress:
            raise ImportError(f"a progress bar needs rich: {how_to_install('cli')}") from None
        yield lambda: None
        return
    with Progress(console=Console(stderr=True)) as bar:
        left = total = count()
        task = bar.add_task("requests", total=total)

        def look() -> None:
            nonlocal left, total
            before, left = left, count()
            total += max(0, left - before)  # new requests
            bar.update(task, completed=total - left, total=total)

        yield look
