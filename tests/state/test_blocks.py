"""Blocks: runs of cells as single pieces of bytes, and sequences put together of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import (
    ArgumentError,
    NoKvCacheSlot,
    StateDamaged,
    StateLayoutMismatch,
    UnsupportedOperation,
)

MakeBench = Callable[..., Bench]
WITH_STATES = tuple(case for case in CASES if case.has_states and case.name != "t5")
WITH_CELLS = tuple(case for case in WITH_STATES if case.info.memory != "recurrent")
SIZE = 8


def blocks_of(ctx: LlamaContext, seq: int, n: int) -> list[tuple[np.ndarray[Any, Any], int, int]]:
    """The first n tokens of a sequence in blocks, the last of which may be short."""
    cell = ctx.native.block_bytes()
    found = []
    for first in range(0, 0 if ctx.memory_kind == "recurrent" else n, SIZE):
        count = min(SIZE, n - first)
        out = np.empty(cell * count, np.uint8)
        assert ctx.native.get_block(seq, first, count, out)
        found.append((out, count, count))
    return found


@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_sequence_is_the_sum_of_its_blocks(case: Case, flash_attn: str, bench: MakeBench) -> None:
    # Transposed values, or not.
    b = bench(case, n_seq_max=3, flash_attn=flash_attn)
    tokens = b.feed(0, 21)
    rest = None
    if b.ctx.native.has_rest:
        rest = b.ctx.native.get_partial_state(0)
    blocks = blocks_of(b.ctx, 0, 21)
    b.ctx.native.set_blocks(1, blocks, rest)
    b.held[1] = tokens.tolist()
    if flash_attn == "disabled":
        b.check(0, 1, n=3)
    else:
        one, other = (b.ctx.sequence_state(seq).parts for seq in (0, 1))
        for mine, theirs in zip(one, other, strict=True):
            for tensor, copied in zip(mine.tensors, theirs.tensors, strict=True):
                np.testing.assert_array_equal(tensor, copied)


def test_a_part_of_a_block_counts(bench: MakeBench) -> None:
    for case in WITH_STATES:
        if case.name in ("llama", "qwen2vl") and case.swa_full:
            b = bench(case, n_seq_max=3)
            tokens = b.feed(0, 20)
            blocks = blocks_of(b.ctx, 0, 20)
            b.ctx.native.set_blocks(1, [*blocks[:1], (blocks[1][0], SIZE, 3)])
            b.held[1] = tokens[:11].tolist()
            b.check(0, 1, n=2)


def test_cells_that_are_not_there_and_bytes_that_do_not_fit(bench: MakeBench) -> None:
    case = next(c for c in WITH_STATES if c.name == "llama" and c.unified)
    b = bench(case, n_seq_max=3)
    b.feed(0, 20)
    native = b.ctx.native
    cell = native.block_bytes()
    out = np.zeros(cell * SIZE, np.uint8)
    assert not native.get_block(0, 13, SIZE, out)
    assert not native.get_block(1, 0, 1, out)
    with pytest.raises(ValueError, match="bytes"):
        native.get_block(0, 0, SIZE + 1, out)
    blocks = blocks_of(b.ctx, 0, 16)
    before = b.ctx.get_state(0)
    for wrong in (
        [(blocks[0][0][:-1], SIZE, SIZE)],
        [(blocks[0][0], SIZE + 1, SIZE)],
        [(blocks[0][0], SIZE, SIZE + 1)],
        [(blocks[0][0], SIZE, -1)],
        [(blocks[0][0], -1, 0)],
    ):
        with pytest.raises((StateLayoutMismatch, ValueError)):
            native.set_blocks(0, wrong)
    spoiled = np.full_like(blocks[0][0], 0xFF)  # NaN
    with pytest.raises(StateDamaged):
        native.set_blocks(0, [blocks[0], (spoiled, SIZE, SIZE)])
    with pytest.raises(NoKvCacheSlot):
        native.set_blocks(0, blocks * 200)
    np.testing.assert_array_equal(b.ctx.get_state(0), before)


def test_memories_without_blocks(bench: MakeBench) -> None:
    recurrent = next(c for c in WITH_STATES if c.name == "mamba")
    b = bench(recurrent)
    b.feed(0, 5)
    assert b.ctx.native.block_bytes() == 0
    with pytest.raises(UnsupportedOperation):
        b.ctx.native.get_block(0, 0, 1, np.zeros(8, np.uint8))


@pytest.mark.parametrize("case", WITH_CELLS, ids=str)
def test_values_are_looked_at_when_blocks_come_out(case: Case, bench: MakeBench) -> None:
    """What comes out goes back without a second look; other parts are looked at all the same."""
    b = bench(case, n_seq_max=3)
    native, tokens = b.ctx.native, b.feed(0, 21)
    is_attention = not b.ctx.native.has_rest
    rest = None if is_attention else native.get_partial_state(0)
    blocks = blocks_of(b.ctx, 0, 21)
    native.set_blocks(1, blocks, rest, known_values=True)
    b.held[1] = tokens.tolist()
    b.check(1, n=2)
    one = np.empty(native.block_bytes() * SIZE, np.uint8)
    two = np.empty_like(one)
    assert native.get_blocks(0, 0, SIZE, [one, two])
    np.testing.assert_array_equal(one, blocks[0][0])
    np.testing.assert_array_equal(two, blocks[1][0])
    assert not native.get_blocks(0, 8, SIZE, [one, two])
    last = np.empty(native.block_bytes() * 5, np.uint8)
    alone = np.empty_like(last)
    two[:] = 0
    assert native.get_blocks(0, 0, SIZE, [one, two, last], 5)
    assert native.get_block(0, 2 * SIZE, 5, alone)
    np.testing.assert_array_equal(two, blocks[1][0])
    np.testing.assert_array_equal(last, alone)
    assert not native.get_blocks(0, 0, SIZE, [one, two, two], 6)
    if native.block_bytes():
        with pytest.raises(ArgumentError, match="6 cells need more"):
            native.get_blocks(0, 0, SIZE, [one, last], 6)
    with pytest.raises(ArgumentError, match="last"):
        native.get_blocks(0, 0, SIZE, [one, last], 0)
    # NaN that got into the cells all the same does not get out of them.
    spoiled = (np.full_like(one, 0xFF), SIZE, SIZE)
    if is_attention:
        native.set_blocks(2, [blocks[0], spoiled], known_values=True)
        assert native.get_block(2, 0, SIZE, one)
        with pytest.raises(StateDamaged, match="sequence 2"):
            native.get_blocks(2, 0, SIZE, [one, two])


@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
@pytest.mark.parametrize("case", WITH_CELLS, ids=str)
def test_blocks_are_checked_without_the_memory(
    case: Case, flash_attn: str, bench: MakeBench
) -> None:
    """A layout says of values what the memory itself would, wherever in a block they are."""
    b = bench(case, n_seq_max=2, flash_attn=flash_attn)
    native = b.ctx.native
    layout = native.block_layout()
    b.feed(0, 2 * SIZE)
    rest = None if not native.has_rest else native.get_partial_state(0)
    blocks = blocks_of(b.ctx, 0, 2 * SIZE)
    data = blocks[1][0]

    def is_refused() -> bool:
        try:
            native.check_blocks(blocks, rest)
        except StateDamaged:
            return True
        return False

    assert layout.is_good(data, SIZE)
    assert not is_refused()
    rng = np.random.default_rng(3)
    first = 4 * SIZE if case.info.has_mrope else 0  # other positions come before the values
    n = len(data) // 4  # 0 where all layers have a window
    for at in (first, n - 1, *rng.integers(first, n, 20)) if n else ():
        values = data.view(np.uint32)
        kept, values[at] = values[at], 0x7F80FF80 if at % 2 else 0x7E007E00  # infinite, or NaN
        assert layout.is_good(data, SIZE) != is_refused(), at
        native.check_blocks(blocks, rest, known_values=True)
        values[at] = kept
    more = np.concatenate([data, data[:1], [0]]).astype(np.uint8)
    for wrong in (data[:-1], data[:0], more):
        assert layout.is_good(wrong, SIZE) == (len(wrong) == len(data))
    assert layout.is_good(data[:0], 0)
    for n in (-1, 2**31):
        with pytest.raises(ValueError, match="n"):
            layout.is_good(data, n)
    b.ctx.close()
    assert layout.is_good(data, SIZE)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
def test_large_copies_are_shared_by_threads(
    flash_attn: str, unified: bool, threads: int, make_context: Callable[..., LlamaContext]
) -> None:
    """From 512 KiB on two threads copy; every byte comes back, and NaN is found by either."""
    options = {"n_ctx": 8192, "n_seq_max": 2, "kv_unified": unified, "flash_attn": flash_attn}
    ctx = make_context("llama", **options, n_threads=threads, type_k="f16", type_v="f16")
    native = ctx.native
    size, n = 64, 60
    rng = np.random.default_rng(5)
    shape = n, native.block_bytes() * size // 2
    blocks = rng.uniform(-1, 1, shape).astype(np.float16).view(np.uint8)
    assert blocks.nbytes > 512 << 10  # WORTH_A_THREAD
    for _ in range(3):
        native.seq_rm(0, None, None)
        native.set_blocks(0, [(block, size, size) for block in blocks])
        out = np.empty_like(blocks)
        assert native.get_blocks(0, 0, size, list(out))
        np.testing.assert_array_equal(out, blocks)
        state = native.get_state(0, None)
        native.set_state(1, [state], None)
        assert native.get_blocks(1, 0, size, list(out))
        np.testing.assert_array_equal(out, blocks)
    for at in rng.integers(0, n, 4):
        spoiled = blocks.copy()
        spoiled[at, rng.integers(0, shape[1]) * 2 + 1] = 0x7F
        native.set_blocks(1, [(block, size, size) for block in spoiled], known_values=True)
        with pytest.raises(StateDamaged):
            native.get_blocks(1, 0, size, list(out))
    assert not native.get_blocks(0, size, size, list(out))  # the last block is not there
