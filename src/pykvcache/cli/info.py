"""``pykvcache info``."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import click

from pykvcache.cli.options import (
    cache_type_options,
    json_option,
    model_path,
    number,
    option,
    swa_option,
)
from pykvcache.cli.terminal import load_model, table
from pykvcache.context import open_context
from pykvcache.introspection import MemoryInfo
from pykvcache.model import LlamaModel

__all__ = ["context_bytes", "info"]

_EPILOG = """
\b
Examples:
  pykvcache info model.gguf
  pykvcache info model.gguf --n-ctx 32768 --type-k q8_0 --type-v q8_0
  pykvcache info model.gguf --json
"""

#: Cells of a cache come in multiples of this.
CELLS = 256
#: Tokens of a compute step, as in contexts by default; the cache of a window has room for one.
N_UBATCH = 512


@click.command(short_help="Show what a model's cache can do, and its size.", epilog=_EPILOG)
@click.argument("file", type=model_path, default="")
@option(
    "-m --model", "The same as FILE.", type=model_path, metavar="FILE", envvar="PYKVCACHE_MODEL"
)
@option(
    "--n-ctx",
    "Size in tokens of the context whose bytes are shown, rounded up to a multiple of 256. "
    "Default: the trained context.",
    type=number(1, 2**31 - 1),
)
@option("--n-seq-max", "Number of sequences.", type=number(1, 256), default=8)
@cache_type_options
@swa_option
@json_option("Write a JSON object.")
def info(
    file: str,
    model: str | None,
    n_ctx: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show which kind of memory a GGUF uses, the operations that it allows, and its size.

    The size is what the memory takes in a context with these options and default values for the
    rest.
    """
    facts = describe(model or file, n_ctx, **options)
    if as_json:
        click.echo(json.dumps(facts, ensure_ascii=False, indent=1))
    else:
        table((name, _text(name, value)) for name, value in facts.items())


def describe(path: str, n_ctx: int | None, **options: Any) -> dict[str, Any]:
    """Return the facts of a file, by name."""
    with load_model(path, 0) as model:
        facts: dict[str, Any] = {
            "file": model.path,
            "name": model.metadata.get("general.name", ""),
            "description": model.description,
            "architecture": model.metadata.get("general.architecture", ""),
            "parameters": model.n_params,
            "size_bytes": model.size,
            "trained_context": model.n_ctx_train,
            "vocabulary": model.n_vocab,
            "layers": model.n_layer,
            "heads": model.n_head,
            "heads_kv": model.n_head_kv,
            "width": model.n_embd,
            "rotary_embedding": model.rope_type.name.lower(),
            "sliding_window": model.n_swa,
            "chat_template": model.chat_template is not None,
        }
        memory, _ = _try(model, CELLS, **options)
        facts["memory"] = memory.kind
        if memory.kind == "none":
            return facts
        facts.update(
            {
                "can_fork": True,
                "can_fork_a_part": memory.can_copy_partial,
                "can_rewind": memory.can_remove_partial,
                "can_shift": memory.can_shift,
                "bytes_per_token": memory.bytes_per_token,
            }
        )
        wanted = n_ctx or max(1, min(model.n_ctx_train, 2**31 - 1))
        facts["cache_tokens"] = -(-wanted // 256) * 256  # as llama.cpp rounds it
        facts["cache_types"] = f"{options['type_k']}, {options['type_v']}"
        cost = context_bytes(model, wanted, **options)
        facts["cache_bytes"] = cost.cache
        facts["compute_bytes"] = cost.compute
    return facts


class ContextBytes(NamedTuple):
    """Bytes of a context's cache, and of its compute buffers."""

    cache: int
    compute: int


def _try(model: LlamaModel, n_ctx: int, **options: Any) -> tuple[MemoryInfo, ContextBytes]:
    with open_context(
        model,
        n_ctx=n_ctx,
        n_batch=N_UBATCH,
        n_ubatch=N_UBATCH,
        embeddings=not model.has_decoder,
        **options,
    ) as ctx:
        compute = sum(one.compute for one in ctx.memory_breakdown().values())
        return ctx.memory_info, ContextBytes(ctx.memory_info.bytes_total, compute)


def context_bytes(
    model: LlamaModel, n_ctx: int, *, n_seq_max: int = 1, **options: Any
) -> ContextBytes:
    """Return the bytes of a context of ``n_ctx`` cells, without making a large one.

    Once its windows are full, a cache grows by the same number of bytes per cell. So two small
    contexts give the size of a large one; for compute buffers it is a lower bound.
    """
    memory, _ = _try(model, CELLS, n_seq_max=n_seq_max, **options)
    step = CELLS * (max(1, memory.n_streams))
    n_ctx = -(-n_ctx // step) * step
    full = -(-(model.n_swa * n_seq_max + N_UBATCH) // step) * step + step
    sizes = (n_ctx,) if n_ctx <= full + step else (full, full + step)
    found = [_try(model, size, n_seq_max=n_seq_max, **options)[1] for size in sizes]
    if len(found) == 1:
        return found[0]
    more = (n_ctx - full) // step
    return ContextBytes(*(a + (b - a) * more for a, b in zip(*found, strict=True)))


def _text(name: str, value: Any) -> Any:
    if name.endswith("_bytes"):
        return f"{value:,} bytes ({_binary(value)})"
    if name == "sliding_window":
        return f"{value:,} tokens" if value else "none"
    if name in ("trained_context", "vocabulary", "cache_tokens"):
        return f"{value:,} tokens"
    return value


def _binary(n: int) -> str:
    units = ("bytes", "KiB", "MiB", "GiB", "TiB")
    power = min(max(n.bit_length() - 1, 0) // 10, len(units) - 1)
    size = n / 1024**power
    return f"{size:.3g} {units[power]}" if size < 1000 else f"{size:.0f} {units[power]}"
