"""``pykvcache generate``."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import click

from pykvcache.cli.conversation import closing_quote
from pykvcache.cli.options import (
    context_options,
    file_option,
    json_option,
    make_sampler,
    max_tokens_option,
    model_option,
    number,
    option,
    read_file,
    read_text,
    sampling_options,
    stop_option,
    template_option,
)
from pykvcache.cli.terminal import is_terminal, load_model, note, open_from_options, watched
from pykvcache.model import LlamaModel
from pykvcache.sequence.logprobs import TokenLogprob

__all__ = ["generate"]

_EPILOG = """
\b
Examples:
  pykvcache generate "Once upon a time" -n 60
  pykvcache generate "One day" --samples 3 --seed 1     three texts, the prompt is evaluated once
  echo "Tom has a" | pykvcache generate -t 0 --json
  pykvcache generate --file long.txt -m model.gguf --chat
  pykvcache generate --file long.txt -m model.gguf --cache ~/.cache/blocks    later runs reuse it
  pykvcache generate "A kite:" --json-schema kite.json
"""


@click.command(short_help="Continue a prompt: one text, or many at once.", epilog=_EPILOG)
@click.argument("prompt", required=False)
@model_option
@file_option("prompt")
@max_tokens_option(128, 0, 2**31 - 1, "Most tokens to generate.")
@stop_option("Text that ends the generation; may be given several times.")
@option("--samples", "Number of texts.", type=number(1, 1024), default=1)
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@option("--system", "With --chat: the system message.")
@template_option
@option("--grammar", "A file with a GBNF grammar to follow.", type=click.Path())
@option(
    "--json-schema",
    "A JSON schema to follow: a file, or the schema itself, which begins with {.",
    metavar="SCHEMA",
)
@option(
    "--logprobs",
    "With --json: the log-probabilities of each token and of the N likeliest.",
    type=number(0, 1000),
    default=0,
    metavar="N",
)
@option(
    "--cache cache_place",
    "A folder or address where evaluated prefixes are kept, for this and later commands.",
    metavar="PLACE",
)
@sampling_options
@context_options
@json_option("Write one JSON object per text.")
def generate(
    prompt: str | None,
    model: str,
    file: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    samples: int,
    chat: bool,
    system: str | None,
    template: str | None,
    grammar: str | None,
    json_schema: str | None,
    logprobs: int,
    cache_place: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate text that continues PROMPT ("-", or nothing with a pipe: standard input).

    Several samples share one evaluation of the prompt, and are generated together, with one decode
    per step.
    """
    from pykvcache import BatchGenerator, LlamaSequence, PrefixCache
    from pykvcache.llm import as_tiers
    from pykvcache.prefix.sequence import CachedSequence

    for what, value, needed in (("system", system, chat), ("template", template, chat)):
        if value is not None and not needed:
            raise click.UsageError(f"--{what} goes with --chat")
    if logprobs and not as_json:
        raise click.UsageError("--logprobs goes with --json")
    if grammar is not None and json_schema is not None:
        raise click.UsageError("--grammar and --json-schema were given: one of them")
    text = read_text(prompt, file)
    with load_model(model) as loaded, ExitStack() as stack:
        follow: dict[str, Any] = {}
        if grammar is not None:
            follow = {"grammar": read_file(grammar), "model": loaded}
        if json_schema is not None:
            is_text = json_schema.lstrip().startswith("{")
            schema = json_schema if is_text else read_file(json_schema)
            follow = {"json_schema": schema, "model": loaded}
        sampler = make_sampler(options, **follow)
        given: Any = text
        if chat:
            given, quote = _rendered(loaded, text, system, template)
            stop += quote
        ctx = stack.enter_context(open_from_options(loaded, options, n_seq_max=min(samples, 64)))
        start = time.perf_counter()
        cache: PrefixCache | None = None
        sequence: LlamaSequence
        if cache_place is None:
            sequence = LlamaSequence(ctx, given)
        else:
            cache = stack.enter_context(PrefixCache(ctx, tiers=as_tiers(cache_place)))
            sequence = cache.sequence(given)
        with sequence:
            n_prompt = len(sequence)
            if n_prompt == 0:
                raise click.UsageError("the prompt has no tokens")
            if n_prompt > ctx.n_ctx_seq and ctx.memory_kind != "recurrent":
                raise click.ClickException(
                    f"the prompt has {n_prompt} tokens, and the cache has room for "
                    f"{ctx.n_ctx_seq}: give a larger --n-ctx"
                )
            reused = ""
            if isinstance(sequence, CachedSequence):
                reused = f", {n_prompt - sequence.reuse.evaluated} of them reused,"
            with watched(ctx, n_prompt):
                sequence.logits()  # evaluates; the first token is chosen from them
            evaluated = time.perf_counter() - start
            if samples == 1:
                found = [_stream(sequence, max_tokens, sampler, stop, logprobs, echo=not as_json)]
            else:
                generator = BatchGenerator(ctx if cache is None else cache)
                found = generator.submit(
                    sequence, max_tokens, sampler, n=samples, stop=stop, logprobs=logprobs
                )
                generator.run()
                if not as_json:
                    for number, each in enumerate(found):
                        click.secho(f"--- {number}", dim=True)
                        click.echo(each.text)
        seconds = time.perf_counter() - start
        n_new = sum(len(each.tokens) for each in found)
        if as_json:
            for each in found:
                click.echo(json.dumps(_line(each, n_prompt, logprobs), ensure_ascii=False))
        if is_terminal(sys.stderr):
            rate = n_new / max(seconds - evaluated, 1e-9)
            note(
                f"[{n_prompt} tokens{reused} in {evaluated:.2f} s, {n_new} generated, {rate:.0f} "
                f"tokens/s, {found[0].finish_reason}]"
            )


def _rendered(
    model: LlamaModel, text: str, system: str | None, template: str | None
) -> tuple[Any, tuple[str, ...]]:
    """Return the tokens of a chat with one message of the user, and what ends the answer."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    own = None if template is None else read_file(template)
    rendered = model.apply_chat_template(messages, template=own)
    tokens = model.tokenize(rendered, add_special=False, parse_special=True)
    return tokens, closing_quote(rendered)


def _line(one: Any, n_prompt: int, logprobs: int) -> dict[str, Any]:
    """Return a text for JSON."""
    line = {
        "text": one.text,
        "n_prompt": n_prompt,
        "n_tokens": len(one.tokens),
        "finish": one.finish_reason,
    }
    if logprobs:
        line["logprobs"] = [_named(each) for each in one.token_logprobs]
    return line


def _named(one: TokenLogprob) -> dict[str, Any]:
    """Return a token's log-probability for JSON."""
    found = {"token": one.token, "text": one.text, "logprob": one.logprob}
    return found | ({"top": [_named(other) for other in one.top]} if one.top else {})


def _stream(
    sequence: Any, max_tokens: int, sampler: Any, stop: tuple[str, ...], n: int, *, echo: bool
) -> Any:
    """Generate and show a text; return it with the attributes of a `GenerationHandle`."""
    before, pieces = len(sequence), []
    stream = sequence.stream(max_tokens, sampler, stop=stop, on_full="stop", logprobs=n)
    for piece in stream:
        pieces.append(piece)
        if echo:
            click.echo(piece, nl=False)
    if echo:
        click.echo()
    return SimpleNamespace(
        text="".join(pieces),
        tokens=sequence.tokens[before:],
        finish_reason=stream.finish_reason,
        token_logprobs=stream.token_logprobs,
    )
