"""What is written beside the answer: notes and progress bars, on stderr."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from pykvcache.context import LlamaContext
from pykvcache.errors import ContextCreateError, KvCacheError
from pykvcache.model import LlamaModel

__all__ = [
    "is_terminal",
    "load_model",
    "note",
    "one_line",
    "open_context",
    "shown",
    "table",
    "watched",
]

#: Shorter than this, a bar would only flicker.
FEW_TOKENS, SMALL_FILE, POLL = 256, 1 << 28, 0.05


def note(text: str) -> None:
    """Write a remark, dim where there is a terminal; where nobody reads it, nothing is lost."""
    with suppress(OSError):
        click.secho(text, dim=True, err=True)


def one_line(error: BaseException) -> str:
    """Return what an error says: its first line, or the system's reason and the file."""
    if isinstance(error, click.ClickException):
        return " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, KvCacheError):
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether somebody sits at the end of a stream; one that was closed is None."""
    return stream is not None and stream.isatty()


def shown() -> bool:
    """Tell whether stderr is a terminal."""
    return is_terminal(sys.stderr)


def load_model(path: str, **options: object) -> LlamaModel:
    """Load a model; a large one with a bar."""
    given = dict(options)
    try:
        import os

        large = os.path.getsize(path) >= SMALL_FILE
    except OSError:
        large = False
    if not (shown() and large):
        return LlamaModel(path, **given)  # type: ignore[arg-type]
    with click.progressbar(length=1000, label="loading", file=sys.stderr) as bar:

        def progress(fraction: float) -> None:
            bar.update(int(fraction * 1000) - bar.pos)

        return LlamaModel(path, progress=progress, **given)  # type: ignore[arg-type]


def open_context(model: LlamaModel, **options: Any) -> LlamaContext:
    """Open a context; sequences that cannot share one pool of cells get a part of it each."""
    try:
        return LlamaContext(model, **options)
    except ContextCreateError as error:
        if error.what != "kv_unified":
            raise
        return LlamaContext(model, kv_unified=False, **options)


@contextmanager
def watched(ctx: LlamaContext, n_tokens: int, label: str = "prompt") -> Iterator[None]:
    """Show a bar while ``n_tokens`` are evaluated in the body."""
    if not shown() or n_tokens < FEW_TOKENS:
        yield
        return
    start, done = ctx.tokens_evaluated, threading.Event()
    with click.progressbar(length=n_tokens, label=label, file=sys.stderr) as bar:

        def look() -> None:
            while not done.wait(POLL):
                bar.update(min(n_tokens, ctx.tokens_evaluated - start) - bar.pos)

        thread = threading.Thread(target=look, name="pykvcache-bar", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            bar.update(min(n_tokens, ctx.tokens_evaluated - start) - bar.pos)


def table(rows: list[tuple[str, str]], echo: Callable[[str], None] = click.echo) -> None:
    """Write names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        echo(f"{name.ljust(width)}  {value}".rstrip())
