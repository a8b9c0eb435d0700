"""Notes, tables and progress bars; models and contexts that take a while to open."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click

from pykvcache._devices import default_layers
from pykvcache.context import LlamaContext, open_context
from pykvcache.errors import KvCacheError
from pykvcache.model import LlamaModel

__all__ = [
    "context_arguments",
    "is_terminal",
    "load_model",
    "note",
    "one_line",
    "open_from_options",
    "table",
    "watched",
]

#: Fewer tokens and smaller files are read before a progress bar could be seen.
FEW_TOKENS, SMALL_FILE = 256, 1 << 28
POLL = 0.05
#: Options that are arguments of `LlamaContext`.
_CONTEXT = ("n_ctx", "type_k", "type_v", "swa_full", "n_threads")


def note(text: str) -> None:
    """Write a remark to stderr, dim in a terminal; ignore an output that is closed."""
    with suppress(OSError):
        click.secho(text, dim=True, err=True)


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the system's reason and the file."""
    if isinstance(error, click.ClickException):
        return " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, KvCacheError):
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; a closed one is None."""
    return stream is not None and stream.isatty()


def load_model(path: str, n_gpu_layers: int | None = None, **options: Any) -> LlamaModel:
    """Load a model; a large one with a progress bar. By default GPUs take all layers."""
    options["n_gpu_layers"] = default_layers() if n_gpu_layers is None else n_gpu_layers
    is_large = os.path.exists(path) and os.path.getsize(path) >= SMALL_FILE
    if not (is_large and is_terminal(sys.stderr)):
        return LlamaModel(path, **options)
    with click.progressbar(length=1000, label="loading", file=sys.stderr) as bar:

        def progress(fraction: float) -> None:
            bar.update(int(fraction * 1000) - bar.pos)

        return LlamaModel(path, progress=progress, **options)


def context_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of `options` that ``context_options`` adds, as arguments of `LlamaContext`."""
    found = {name: options[name] for name in _CONTEXT if name in options}
    return found | {"adapters": [*options.get("lora", ()), *options.get("lora_scaled", ())]}


def open_from_options(model: LlamaModel, options: dict[str, Any], **more: Any) -> LlamaContext:
    """Open a context with those of `options` that ``context_options`` adds, and more."""
    return open_context(model, **context_arguments(options), **more)


@contextmanager
def watched(ctx: LlamaContext, n_tokens: int) -> Iterator[None]:
    """Show a progress bar while the block evaluates ``n_tokens``."""
    if n_tokens < FEW_TOKENS or not is_terminal(sys.stderr):
        yield
        return
    start, done = ctx.tokens_evaluated, threading.Event()
    with click.progressbar(length=n_tokens, label="prompt", file=sys.stderr) as bar:

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


def table(rows: Iterable[tuple[str, object]]) -> None:
    """Write names and values in two columns; underscores in names become spaces."""
    shown = [(name.replace("_", " "), _shown(value)) for name, value in rows]
    width = max(len(name) for name, _ in shown)
    for name, text in shown:
        click.echo(f"{name.ljust(width)}  {text}".rstrip())


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
