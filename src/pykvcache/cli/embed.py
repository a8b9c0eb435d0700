"""``pykvcache embed``."""

from __future__ import annotations

import json

import click

from pykvcache._embedder import Embedder
from pykvcache.cli.options import file_option, layers_option, model_option, read_file, read_text
from pykvcache.cli.terminal import load_model

__all__ = ["embed"]

_EPILOG = """
\b
Examples:
  pykvcache embed "a red kite" "a small bakery" -m model.gguf
  pykvcache embed --lines --file names.txt -m model.gguf > rows.jsonl
"""


@click.command(short_help="Write embeddings of texts.", epilog=_EPILOG)
@click.argument("texts", nargs=-1)
@model_option
@file_option("text")
@layers_option
@click.option("--lines", is_flag=True, help="Embed each line of the file or of the pipe.")
def embed(
    texts: tuple[str, ...], model: str, file: str | None, n_gpu_layers: int | None, lines: bool
) -> None:
    """Write the embeddings of TEXTS (unit length), one JSON list of numbers per line.

    Without TEXTS, standard input is embedded.
    """
    if texts and (file is not None or lines):
        raise click.UsageError("give either TEXTS, or --file or --lines")
    given = list(texts)
    if not given:
        whole = read_file(file) if file is not None else read_text(None, None)
        given = whole.splitlines() if lines else [whole]
    with load_model(model, n_gpu_layers) as loaded, Embedder(loaded) as embedder:
        for row in embedder.embed([loaded.tokenize(one) for one in given]):
            click.echo(json.dumps([round(float(x), 7) for x in row]))
