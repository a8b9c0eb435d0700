"""What is known of a context: what its blocks depend on, how large ends are, how fast it is."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable

from pykvcache._native import lib
from pykvcache.context import LlamaContext
from pykvcache.state.layout import BLOCK_PARTS

__all__ = ["digests", "end_bytes", "least_seconds", "progress_of"]

# Operations per second, which a thread of a processor and a graphics card hardly exceed.
_PER_THREAD, _PER_DEVICE = 1e11, 5e14


def digests(ctx: LlamaContext) -> tuple[bytes, bytes, bytes]:
    """Return what blocks depend on: the model, the rotation of keys, the layout of a block.

    The numbers of cells and sequences are left out: a later context may have others.
    """
    fingerprint = ctx._fingerprint
    parts = [
        # The states of other parts say how many streams there are; windows, what they keep.
        (part.to_json(), None if part.part in BLOCK_PARTS else (part.n_stream, _is_whole(ctx)))
        for part in (ctx._layouts if ctx.native.has_layout else ())
    ]
    # Where the parts are not known, nothing leaves this context.
    layout = repr(
        (parts or ctx.memory_info, fingerprint.causal, fingerprint.n_swa, fingerprint.adapters)
    )
    return (
        bytes.fromhex(fingerprint.model),
        bytes.fromhex(fingerprint.rope_digest),
        hashlib.sha256(layout.encode()).digest(),
    )


def _is_whole(ctx: LlamaContext) -> bool:
    """Whether windows keep all cells."""
    cells = {part["part"]: part["n_cells"] for part in ctx.native.state_layout("PrefixCache")}
    return "window" in cells and cells["window"] == cells.get("attention")


def end_bytes(ctx: LlamaContext) -> int:
    """Return the most bytes that the state of other parts and a row of logits can have."""
    size = 4096 + 4 * ctx.model.n_vocab
    if not ctx.native.has_layout:
        return size
    for part in ctx.native.state_layout("PrefixCache"):
        if part["part"] not in BLOCK_PARTS:
            per_cell = 64 + sum(row[4] for row in part["rows"])
            size += per_cell * part["n_cells"] + 64 * len(part["rows"]) + 16 * part["n_stream"]
    return size


def least_seconds(ctx: LlamaContext) -> float:
    """Return what evaluating a token takes at least, before any was: from the model's size."""
    rate = _PER_DEVICE if lib.devices() != ["CPU"] else _PER_THREAD * max(1, ctx.n_threads_batch)
    return 2 * ctx.model.n_params / rate


def progress_of(ctx: LlamaContext) -> Callable[[], int]:
    """Return what tells how many tokens were evaluated; it does not keep the context alive."""
    ref = weakref.ref(ctx)

    def progress() -> int:
        context = ref()
        return 0 if context is None else context.tokens_evaluated

    return progress
