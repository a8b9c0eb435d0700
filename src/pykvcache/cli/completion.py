"""``pykvcache completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_EPILOG = """
\b
For one shell, or for all of them in its start file (~/.bashrc, ~/.zshrc):
  eval "$(pykvcache completion bash)"
  pykvcache completion fish > ~/.config/fish/completions/pykvcache.fish
"""


@click.command(short_help="Write what lets a shell complete commands.", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Write a script with which SHELL completes commands, options and files."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    app = context.find_root().command
    click.echo(kind(app, {}, "pykvcache", "_PYKVCACHE_COMPLETE").source())
