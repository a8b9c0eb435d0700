"""``pykvcache completion``."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

__all__ = ["completion"]

_EPILOG = """
\b
For the current shell; to enable it always, add the line to ~/.bashrc or ~/.zshrc:
  eval "$(pykvcache completion bash)"
  eval "$(pykvcache completion zsh)"
\b
For fish:
  pykvcache completion fish > ~/.config/fish/completions/pykvcache.fish
"""


@click.command(short_help="Write a shell's completion script.", epilog=_EPILOG)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Write the script that lets SHELL complete commands, options and files."""
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    app = context.find_root().command
    click.echo(kind(app, {}, "pykvcache", "_PYKVCACHE_COMPLETE").source())
