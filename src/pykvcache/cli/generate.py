"""``pykvcache generate``."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from pykvcache.cli.options import (
    cache_type_options,
    make_sampler,
    model_option,
    n_ctx_option,
    number,
    read_file,
    read_text,
    sampling_options,
    stop_text,
    threads_option,
)
from pykvcache.cli.talk import closing
from pykvcache.cli.terminal import load_model, note, open_context, shown, watched

__all__ = ["generate"]

_EPILOG = """
\b
Examples:
  pykvcache generate "Once upon a time" -n 60
  pykvcache generate "One day" --samples 3 --seed 1     three texts, one evaluation of the prompt
  echo "Tom has a" | pykvcache generate -t 0 --json
  pykvcache generate --file long.txt -m model.gguf --chat
"""


@click.command(short_help="Go on from a prompt: one text, or many at once.", epilog=_EPILOG)
@click.argument("prompt", required=False)
@model_option
@click.option("-f", "--file", type=click.Path(), help="Read the prompt from a file.")
@click.option(
    "-n",
    "--max-tokens",
    type=number(0, 2**31 - 1),
    default=128,
    show_default=True,
    help="Tokens at most.",
)
@click.option(
    "--stop",
    type=stop_text,
    multiple=True,
    metavar="TEXT",
    help="Text that ends it; may be given several times.",
)
@click.option(
    "--samples", type=number(1, 1024), default=1, show_default=True, help="How many texts."
)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", help="With --chat: the system message.")
@click.option("--grammar", type=click.Path(), help="A file with a GBNF grammar to follow.")
@sampling_options
@n_ctx_option
@cache_type_options
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object per text.")
def generate(
    prompt: str | None,
    model: str,
    file: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    samples: int,
    chat: bool,
    system: str | None,
    grammar: str | None,
    n_ctx: int,
    type_k: Any,
    type_v: Any,
    threads: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Generate text that goes on from PROMPT ("-", or nothing with a pipe: standard input).

    Several samples of one prompt are forks of one evaluation, and are generated together, with
    one decode per step.
    """
    from pykvcache import BatchGenerator, LlamaSequence

    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    text = read_text(prompt, file)
    with load_model(model) as loaded:
        if grammar is not None:
            sampling.update(grammar=read_file(grammar), model=loaded)
        sampler = make_sampler(**sampling)
        given: Any = text
        if chat:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": text})
            rendered = loaded.apply_chat_template(messages)
            given = loaded.tokenize(rendered, add_special=False, parse_special=True)
            stop += closing(rendered)
        with open_context(
            loaded,
            n_ctx=n_ctx,
            n_seq_max=min(samples, 64),
            type_k=type_k,
            type_v=type_v,
            n_threads=threads,
        ) as ctx:
            start = time.perf_counter()
            with LlamaSequence(ctx, given) as sequence:
                n_prompt = len(sequence)
                if n_prompt == 0:
                    raise click.UsageError("the prompt has no tokens")
                if n_prompt > ctx.n_ctx_seq and ctx.memory_kind != "recurrent":
                    raise click.ClickException(
                        f"the prompt has {n_prompt} tokens, and the cache has room for "
                        f"{ctx.n_ctx_seq}: give a larger --n-ctx"
                    )
                with watched(ctx, n_prompt):
                    sequence.logits()  # evaluates; the first token is chosen from them
                evaluated = time.perf_counter() - start
                if samples == 1:
                    texts = [_stream(sequence, max_tokens, sampler, stop, echo=not as_json)]
                else:
                    generator = BatchGenerator(ctx)
                    handles = generator.submit(sequence, max_tokens, sampler, n=samples, stop=stop)
                    generator.run()
                    texts = [(h.text, len(h.tokens), h.finish_reason) for h in handles]
                    if not as_json:
                        for number, (each, _, _) in enumerate(texts):
                            click.secho(f"--- {number}", dim=True)
                            click.echo(each)
            seconds = time.perf_counter() - start
            n_new = sum(n for _, n, _ in texts)
            if as_json:
                for each, n, reason in texts:
                    line = {"text": each, "n_prompt": n_prompt, "n_tokens": n, "finish": reason}
                    click.echo(json.dumps(line, ensure_ascii=False))
            if shown():
                rate = n_new / max(seconds - evaluated, 1e-9)
                note(
                    f"[{n_prompt} tokens in {evaluated:.2f} s, {n_new} generated, {rate:.0f} "
                    f"tokens/s, {texts[0][2]}]"
                )


def _stream(
    sequence: Any, max_tokens: int, sampler: Any, stop: tuple[str, ...], *, echo: bool
) -> tuple[str, int, str | None]:
    before, pieces = len(sequence), []
    stream = sequence.stream(max_tokens, sampler, stop=stop, on_full="stop")
    for piece in stream:
        pieces.append(piece)
        if echo:
            click.echo(piece, nl=False)
    if echo:
        click.echo()
    return "".join(pieces), len(sequence) - before, stream.finish_reason
