"""How long one sequence of a context can be."""

from __future__ import annotations

from pykvcache.context import LlamaContext
from pykvcache.errors import NoKvCacheSlot, PositionError

__all__ = ["check_length", "most_tokens"]


def most_tokens(ctx: LlamaContext) -> int:
    """Return how many tokens one sequence can have: its cells, and the positions of the model."""
    positions = ctx.max_position + 1
    return positions if ctx.memory_kind == "recurrent" else min(ctx.n_ctx_seq, positions)


def check_length(ctx: LlamaContext, n: int) -> None:
    """Refuse what could not be evaluated if it were alone, before anybody leaves for it."""
    if n <= most_tokens(ctx):
        return
    if ctx.memory_kind == "recurrent" or n <= ctx.n_ctx_seq:
        last = ctx.max_position
        raise PositionError(
            f"the sequence has {n} tokens, and the highest position of this model is {last}: "
            "truncate or discard some",
            what="n_tokens",
            value=n - 1,
            limit=last,
        )
    why = f"n_ctx is {ctx.n_ctx}, always a multiple of 256"
    if ctx.n_ctx_seq < ctx.n_ctx:
        why += f", n_seq_max {ctx.n_seq_max} without kv_unified"
    raise NoKvCacheSlot(
        f"the sequence has {n} tokens, and one sequence has room for {ctx.n_ctx_seq} ({why}): "
        'truncate or discard some, generate with on_full="shift" or "stop", or make the context '
        "with a larger n_ctx",
        1,
        n_tokens=n,
        n_cells=ctx.n_ctx_seq,
    )
