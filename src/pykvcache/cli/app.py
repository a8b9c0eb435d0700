"""The group of all commands, and how their errors are reported."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence

import click
from click.shell_completion import get_completion_class

from pykvcache.cli.bench import bench
from pykvcache.cli.cache import cache
from pykvcache.cli.chat import chat
from pykvcache.cli.demo import demo
from pykvcache.cli.embed import embed
from pykvcache.cli.generate import generate
from pykvcache.cli.info import info
from pykvcache.cli.rpc_server import rpc_server
from pykvcache.cli.serve import serve
from pykvcache.cli.state import state
from pykvcache.cli.terminal import one_line
from pykvcache.cli.tokenize import tokenize
from pykvcache.errors import KvCacheError

__all__ = ["app", "run"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130

_EPILOG = """
\b
Start here:
  pykvcache demo                            forks, rewinds and shifts, each checked
  pykvcache generate "Once upon a time"     text from the small model in the package
  pykvcache info model.gguf                 what its cache can do, and its size
  pykvcache chat -m model.gguf              a chat with /fork, /rewind, /help
  pykvcache chat -m model.gguf -s chat.kv   the same, saved for next time
  pykvcache serve -m model.gguf             a server for OpenAI's and Anthropic's clients

Without -m the model is the one that PYKVCACHE_MODEL names, or else the 4 MB story model in the
package.
"""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(package_name="pykvcache", message="%(prog)s %(version)s")
def app() -> None:
    """llama.cpp's KV cache: generate, chat, serve, look inside, save and restore."""


_COMPLETION_EPILOG = """
\b
For the current shell; to enable it always, add the line to ~/.bashrc or ~/.zshrc:
  eval "$(pykvcache completion bash)"
  eval "$(pykvcache completion zsh)"
\b
For fish:
  pykvcache completion fish > ~/.config/fish/completions/pykvcache.fish
"""


@app.command(short_help="Write a shell's completion script.", epilog=_COMPLETION_EPILOG)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Write the script that lets SHELL complete commands, options and files."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    click.echo(kind(app, {}, "pykvcache", "_PYKVCACHE_COMPLETE").source())


for command in (
    *(generate, chat, embed, info, tokenize, state),
    *(cache, serve, bench, demo, rpc_server),
):
    app.add_command(command)


def _warn(message: object, *_: object, **__: object) -> None:
    """Show a warning without the line of code that it is about."""
    click.echo(f"pykvcache: {message}", err=True)


def run(argv: Sequence[str]) -> int:
    """Run a command; return the exit code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # The terminal's encoding may lack characters of the text, and input may be any bytes.
        if hasattr(stream, "reconfigure"):
            with contextlib.suppress(OSError):  # the stream was read from already
                stream.reconfigure(errors="replace")
    color = False if os.environ.get("NO_COLOR") else None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = app.main(list(argv), prog_name="pykvcache", standalone_mode=False, color=color)
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "pykvcache"
        click.echo(f"{where}: {one_line(error)} (see {where} --help)", err=True)
        return USAGE
    except click.ClickException as error:
        click.echo(f"pykvcache: {one_line(error)}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would report it again at exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return FAILURE
    except (KvCacheError, OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
        click.echo(f"pykvcache: {one_line(error)}", err=True)
        return FAILURE
