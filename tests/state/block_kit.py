"""A sequence's cells in the form of `set_blocks`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykvcache import LlamaContext

SIZE = 8

Block = tuple[np.ndarray[Any, Any], int, int]


def blocks_of(
    ctx: LlamaContext, seq: int, n: int, part: str = "attention", first: int = 0
) -> list[Block]:
    """Return the tokens [first, n) of a sequence in blocks; the last may be short."""
    cell = ctx.native.block_bytes(part)
    found = []
    for begin in range(first, n, SIZE):
        count = min(SIZE, n - begin)
        out = np.empty(cell * count, np.uint8)
        assert ctx.native.get_block(seq, begin, count, out, part)
        found.append((out, count, count))
    return found


def parts_of(
    ctx: LlamaContext, seq: int, n: int, *, window_first: int | None = None
) -> tuple[list[Block], list[Block], int, Any]:
    """Return n tokens of a sequence, with the window cells that the next token sees, or more."""
    native = ctx.native
    first = native.window_needed(n) if window_first is None else window_first
    return (
        [] if ctx.memory_kind == "recurrent" else blocks_of(ctx, seq, n),
        blocks_of(ctx, seq, n, "window", first) if native.has_window else [],
        first,
        native.get_state_part(seq) if native.has_state_part else None,
    )
