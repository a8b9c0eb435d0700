"""``pykvcache tokenize``."""

from __future__ import annotations

import json

import click

from pykvcache.cli.options import file_option, model_option, read_text
from pykvcache.cli.terminal import load_model
from pykvcache.errors import shown

__all__ = ["tokenize"]

_EPILOG = """
\b
Examples:
  pykvcache tokenize "Once upon a time"
  pykvcache tokenize --count --file book.txt -m model.gguf
  pykvcache tokenize --decode "1 402 33"
"""


@click.command(short_help="Show the tokens of a text.", epilog=_EPILOG)
@click.argument("text", required=False)
@model_option
@file_option("text")
@click.option("--no-special", is_flag=True, help="Do not add the model's BOS and EOS.")
@click.option(
    "--parse-special", is_flag=True, help="Parse special tokens such as </s> in the text."
)
@click.option("--ids", "form", flag_value="ids", help="Write the ids on one line.")
@click.option("--count", "form", flag_value="count", help="Write the number of tokens.")
@click.option("--json", "form", flag_value="json", help="Write a JSON list of ids and pieces.")
@click.option("--decode", is_flag=True, help="TEXT holds token ids: write their text.")
def tokenize(
    text: str | None,
    model: str,
    file: str | None,
    no_special: bool,
    parse_special: bool,
    form: str | None,
    decode: bool,
) -> None:
    """Show the tokens of TEXT, one per line.

    Standard input is read if TEXT is -, or if TEXT is missing and input is piped in.
    """
    given = read_text(text, file)
    with load_model(model, 0, vocab_only=True) as loaded:
        if decode:
            ids = [_token_id(word) for word in given.replace(",", " ").split()]
            click.echo(loaded.detokenize(ids, special=True))
            return
        tokens = loaded.tokenize(
            given, add_special=not no_special, parse_special=parse_special
        ).tolist()
        if form == "count":
            click.echo(len(tokens))
        elif form == "ids":
            click.echo(" ".join(map(str, tokens)))
        else:
            pieces = [
                loaded.token_to_piece(t, special=True).decode("utf-8", "backslashreplace")
                for t in tokens
            ]
            if form == "json":
                pairs = [{"id": t, "piece": p} for t, p in zip(tokens, pieces, strict=True)]
                click.echo(json.dumps(pairs, ensure_ascii=False))
            else:
                for token, piece in zip(tokens, pieces, strict=True):
                    click.echo(f"{token:>8}  {piece!r}")


def _token_id(word: str) -> int:
    try:
        return int(word)
    except ValueError:  # also of thousands of digits
        raise click.UsageError(f"{shown(word)} is not a token id") from None
