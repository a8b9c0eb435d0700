"""``pykvcache chat``."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from typing import Any

import click

from pykvcache.cli.commands import Commands
from pykvcache.cli.options import (
    cache_type_options,
    make_sampler,
    model_option,
    n_ctx_option,
    number,
    read_file,
    sampling_options,
    stop_text,
    swa_option,
    template_option,
    threads_option,
)
from pykvcache.cli.terminal import is_terminal, load_model, note, open_context

__all__ = ["chat"]

_EPILOG = """
\b
Examples:
  pykvcache chat -m model.gguf
  pykvcache chat -m model.gguf --session talk.kv        goes on where it stopped, without evaluating
  pykvcache chat -m model.gguf --system "Answer briefly."
\b
In the chat: /help lists what it knows (/fork, /switch, /rewind, /save, ...). Ctrl-C ends an answer,
Ctrl-D the chat.
"""

_ENDS = "(Ctrl-D, or /exit, ends the chat)"


@click.command(
    short_help="Talk to a model: branches, rewinds, saved talks.",
    epilog=_EPILOG,
    context_settings={"allow_extra_args": True},  # refused below, with a hint
)
@model_option
@click.option(
    "-s",
    "--session",
    type=click.Path(dir_okay=False),
    help="A file: the talk is read from it, and kept in it after every turn.",
)
@click.option("--system", help="The system message of a new talk.")
@template_option
@click.option(
    "-n",
    "--max-tokens",
    type=number(1, 2**20),
    default=256,
    show_default=True,
    help="Tokens per answer.",
)
@click.option(
    "--stop",
    type=stop_text,
    multiple=True,
    metavar="TEXT",
    help="Text that ends an answer; may be given several times.",
)
@sampling_options
@n_ctx_option
@cache_type_options
@swa_option
@threads_option
def chat(
    model: str,
    session: str | None,
    system: str | None,
    template: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    n_ctx: int,
    type_k: Any,
    type_v: Any,
    swa_full: bool,
    threads: int | None,
    **sampling: Any,
) -> None:
    """Talk to a model; only what is new is evaluated in each turn.

    A model with a chat template answers; one without goes on with the text, line by line.
    """
    if more := click.get_current_context().args:
        raise click.UsageError(
            f"unexpected argument {more[0]}: --session {more[0]} goes on with a talk in a file, "
            f"-m {more[0]} talks to a model"
        )
    if session is not None:
        _check_folder(session)
    text = None if template is None else read_file(template)
    with (
        load_model(model) as loaded,
        open_context(
            loaded,
            n_ctx=n_ctx,
            n_seq_max=8,
            type_k=type_k,
            type_v=type_v,
            swa_full=swa_full,
            n_threads=threads,
        ) as ctx,
    ):
        sampler = make_sampler(**sampling)
        commands = Commands(ctx, system, session, text)
        commands.begin()
        max_tokens = min(max_tokens, max(1, ctx.n_ctx_seq // 2))
        while True:
            line = _read()
            if line is None or commands.is_over:
                break
            if not line.strip():
                continue
            try:
                if line.startswith("/"):
                    commands.obey(line)
                else:
                    commands.answer(line, max_tokens, sampler, stop)
            except KeyboardInterrupt:  # between two steps: what was said is kept at the end
                click.echo()
                note(_ENDS)
        commands.end()


def _check_folder(session: str) -> None:
    """Refuse a file that cannot be written before a word is said that could not be kept."""
    folder = os.path.dirname(os.path.realpath(session))
    if not os.path.isdir(folder):
        raise click.UsageError(f"--session {session}: there is no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.ClickException(
            f"--session {session}: no file can be made in {folder} ({error.strerror})"
        ) from None


def _read() -> str | None:
    """Return a line; None at the end of the input."""
    if not is_terminal(sys.stdin):
        line = sys.stdin.readline() if sys.stdin is not None else ""
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (arrow keys and history for input())
    try:
        # A prompt that readline does not count would break its lines.
        return input("\001\033[1m\002> \001\033[0m\002" if _is_coloured() else "> ")
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        note(_ENDS)
        return ""


def _is_coloured() -> bool:
    return is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
