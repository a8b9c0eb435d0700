"""Helpers of the tests of saved states: tokens, damaged files, blocks, checks for changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES as ALL_CASES
from memory.kit import Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import StateError
from pykvcache.state.container import Tensor, pack, parse

CASES = [pytest.param(case, id=str(case)) for case in ALL_CASES if case.info.has_states]
"""Every kind of memory in every mode, save what has no states."""

MakeBench = Callable[..., Bench]
# The window of a small cache reuses its cells after 256 tokens.
LONG = {"n_ctx": 2048, "n_ubatch": 32}

_rng = np.random.default_rng(7)
WORDS = _rng.integers(5, 250, 400).astype(np.int32)

Text = dict[str, Any]
Tensors = dict[str, Tensor]


def is_forgetful(case: Case) -> bool:
    """Whether a memory drops cells of a window or folds tokens into a state."""
    return case.has_states and bool(case.info.n_swa or case.info.has_recurrent_state)


def next_logits(ctx: LlamaContext, seq_id: int = 0, token: int = 9) -> Any:
    """Logits after one more token."""
    ctx.decode(np.array([token], np.int32), seq_id=seq_id)
    return ctx.logits()


def cells_of(ctx: LlamaContext, seq_id: int) -> bytes:
    """Return a sequence's cells as llama.cpp's bytes without the sequence id."""
    return ctx.get_state(seq_id)[8:].tobytes()


@contextmanager
def refused(ctx: LlamaContext, *kinds: type[Exception], match: str | None = None) -> Iterator[Any]:
    """Expect one of these errors, with every byte unchanged."""
    before, sequences = ctx.get_state().tobytes(), ctx.sequences()
    with pytest.raises(kinds or StateError, match=match) as caught:
        yield caught
    assert type(caught.value) in kinds or not kinds, f"{type(caught.value)}: {caught.value}"
    assert ctx.get_state().tobytes() == before
    assert ctx.sequences() == sequences


def forged(data: bytes, edit: Callable[[Text, Tensors], None], checksum: str = "sha256") -> bytes:
    """Return a file with other contents and checksums that are right."""
    container = parse(np.frombuffer(data, np.uint8))
    text: Text = {
        key: value
        for key, value in container.metadata.items()
        if key not in ("format", "version", "checksum")
    }
    tensors = dict(container.tensors)
    edit(text, tensors)
    return b"".join(pack(text, list(tensors.values()), checksum))


def ints(tensors: Tensors, name: str, values: Any) -> None:
    """Replace a tensor of integers."""
    array = np.asarray(values, "<i4")
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    tensors[name] = Tensor(name, "I32", array.shape, data)


# A sequence's cells in the form of `set_blocks` --------------------------------------------------

#: Tokens in a block.
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
