"""``pykvcache bench``."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from pykvcache.cli.options import (
    cache_type_options,
    json_option,
    layers_option,
    model_option,
    number,
    option,
    threads_option,
)
from pykvcache.cli.terminal import load_model, open_from_options, table

__all__ = ["bench"]


@click.command(short_help="Measure what the cache saves with a model on this machine.")
@model_option
@option("-n --tokens", "Tokens of the prompt.", type=number(64, 2**20), default=512)
@option("--repeat", "Number of runs; the median is shown.", type=number(1, 100), default=3)
@cache_type_options
@layers_option
@threads_option
@json_option("Write a JSON object (seconds, bytes).")
def bench(model: str, tokens: int, repeat: int, as_json: bool, **options: Any) -> None:
    """Measure what the cache saves with this model, on this machine.

    Evaluates a prompt, generates, forks, saves and restores. Shows how many times faster it is to
    restore a prefix from RAM or from a file than to evaluate it.
    """
    with (
        load_model(model, options["n_gpu_layers"]) as loaded,
        open_from_options(loaded, options, n_ctx=tokens + 512, n_seq_max=10) as ctx,
    ):
        found = _measure(ctx, tokens, repeat)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    evaluated = found["evaluate"]
    rows = [
        ("prompt", f"{tokens} tokens in {_time(evaluated)}, {tokens / evaluated:,.0f} tokens/s"),
        ("generate", f"{32 / found['generate_32']:,.0f} tokens/s"),
        ("8 at once", f"{8 * 32 / found['generate_8x32']:,.0f} tokens/s"),
        ("fork", _time(found["fork"])),
        ("state in memory", f"{found['state_bytes']:,} bytes"),
    ]
    for name, label in (
        ("take_out", "save state"),
        ("put_back", "restore state"),
        ("load", "load file"),
    ):
        times = evaluated / found[name]
        rows.append((label, f"{_time(found[name])}, {times:,.0f} times faster than evaluating"))
    table(rows)


def _measure(ctx: Any, n: int, repeat: int) -> dict[str, float]:
    from pykvcache import BatchGenerator, LlamaSequence, Sampler

    vocabulary = ctx.model.n_vocab
    prompt = [(7 * i) % (vocabulary - 3) + 3 if vocabulary > 3 else 0 for i in range(n)]
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = call(*args)
        found.setdefault(name, []).append(time.perf_counter() - start)
        return result

    # A random prompt may end the generation at once: forbid that.
    ends = {t: float("-inf") for t in range(vocabulary) if ctx.model.is_eog(t)}
    sampler = Sampler(temperature=0, logit_bias=ends)
    state = b""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        for _ in range(repeat):
            with LlamaSequence(ctx, prompt) as sequence:
                timed("evaluate", sequence.evaluate)
                timed("fork", sequence.fork).close()
                state = timed("take_out", ctx.get_state, sequence.seq_id)
                sequence.save(path)
                timed("generate_32", list, sequence.generate(32, sampler))
                sequence.truncate(n)
                generator = BatchGenerator(ctx)
                handles = generator.submit(sequence, 32, sampler, n=8)
                timed("generate_8x32", partial(generator.run, progress=False))
                del handles
            timed("put_back", ctx.set_state, state, 0)
            ctx.clear_kv_cache()
            timed("load", LlamaSequence.load, ctx, path).close()
    figures = {name: statistics.median(times) for name, times in found.items()}
    return figures | {"prompt_tokens": n, "state_bytes": len(state)}


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
