"""``pykvcache generate``."""

from __future__ import annotations

import json
import sys
from itertools import chain
from typing import Any

import click

from pykvcache.cli.conversation import closing_quote
from pykvcache.cli.options import (
    context_options,
    file_option,
    json_option,
    make_sampler,
    model_option,
    number,
    option,
    read_file,
    read_text,
    sampling_options,
    stop_option,
    template_option,
)
from pykvcache.cli.terminal import context_arguments, is_terminal, load_model, note, watched
from pykvcache.generate.request import GenerationHandle
from pykvcache.llm import LLM
from pykvcache.prefix.sequence import CachedSequence
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
@option("-n --max-tokens", "Maximum number of new tokens.", type=number(0, 2**31 - 1), default=128)
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
    "With --json: the log-probabilities of each token and of the N most likely.",
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
    """Generate text that continues PROMPT.

    Standard input is read if PROMPT is -, or if PROMPT is missing and input is piped in.

    Several samples share one evaluation of the prompt, and are generated together, with one decode
    per step.
    """
    for what, value in (("system", system), ("chat-template", template)):
        if value is not None and not chat:
            raise click.UsageError(f"--{what} needs --chat")
    if logprobs and not as_json:
        raise click.UsageError("--logprobs needs --json")
    if grammar is not None and json_schema is not None:
        raise click.UsageError("give --grammar or --json-schema, not both")
    text = read_text(prompt, file)
    with load_model(model, options["n_gpu_layers"]) as loaded:
        if json_schema is not None and not json_schema.lstrip().startswith("{"):
            json_schema = read_file(json_schema)
        rules = None if grammar is None else read_file(grammar)
        sampler = make_sampler(options, model=loaded, grammar=rules, json_schema=json_schema)
        if chat:
            messages = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": text})
            own = None if template is None else read_file(template)
            text = loaded.apply_chat_template(messages, template=own)
            stop += closing_quote(text)
        tokens = loaded.tokenize(text, add_special=not chat, parse_special=chat)
        memory = {"cache": cache_place} if cache_place is not None else {"ram_bytes": 0}
        with LLM(
            loaded, n_parallel=min(samples, 64), **context_arguments(options), **memory
        ) as llm:
            _check_length(llm, len(tokens))
            found: Any = llm.generator.submit(
                tokens, max_tokens, sampler, n=samples, stop=stop, logprobs=logprobs
            )
            handles: list[GenerationHandle] = [found] if samples == 1 else found
            _run(llm, handles, len(tokens), echo=not as_json)
            if as_json:
                for each in handles:
                    line = _line(each, len(tokens), logprobs)
                    click.echo(json.dumps(line, ensure_ascii=False))
            if is_terminal(sys.stderr):
                note(f"[{_figures(handles, len(tokens))}]")


def _check_length(llm: LLM, n_prompt: int) -> None:
    room = llm.context.n_ctx_seq
    if n_prompt == 0:
        raise click.UsageError("the prompt has no tokens")
    if n_prompt > room and llm.context.memory_kind != "recurrent":
        raise click.ClickException(
            f"the prompt has {n_prompt} tokens, but the cache has room for {room}: give a larger "
            "--n-ctx"
        )


def _run(llm: LLM, handles: list[GenerationHandle], n_prompt: int, *, echo: bool) -> None:
    """Generate the texts; with `echo` show one as it is generated, or all at the end."""
    if len(handles) == 1:
        stream = handles[0].stream()
        with watched(llm.context, n_prompt):
            first = next(stream, "")
        for piece in chain((first,), stream):
            if echo:
                click.echo(piece, nl=False)
        if echo:
            click.echo()
    else:
        llm.generator.run()
        for number, each in enumerate(handles if echo else ()):
            click.secho(f"--- {number}", dim=True)
            click.echo(each.text)


def _figures(handles: list[GenerationHandle], n_prompt: int) -> str:
    one, times = handles[0], handles[0].times
    end = max(each.times.finished or 0.0 for each in handles)
    evaluated = times.first_token or end
    n_new = sum(len(each.tokens) for each in handles)
    reused = ""
    if isinstance(one.sequence, CachedSequence) and one.sequence.reuse.evaluated < n_prompt:
        reused = f", {n_prompt - one.sequence.reuse.evaluated} of them reused,"
    return (
        f"{n_prompt} tokens{reused} in {evaluated - times.queued:.2f} s, {n_new} generated, "
        f"{n_new / max(end - evaluated, 1e-9):.0f} tokens/s, {one.finish_reason}"
    )


def _line(one: GenerationHandle, n_prompt: int, logprobs: int) -> dict[str, Any]:
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
