"""Blocks: runs of cells as single pieces of bytes, and sequences put together of them.

Attention cells and window cells have blocks of their own, recurrent layers a state. What the next
token does not see of a window need not be there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from memory.kit import CASES, Bench, Case
from pykvcache import LlamaContext
from pykvcache.errors import (
    ArgumentError,
    KvCacheError,
    NoKvCacheSlot,
    StateDamaged,
    StateError,
    StateLayoutMismatch,
    UnsupportedOperation,
)
from state.kit import LONG, SIZE, MakeBench, blocks_of, parts_of

WITH_STATES = tuple(case for case in CASES if case.has_states and case.name != "t5")
WITH_CELLS = tuple(case for case in WITH_STATES if case.info.memory != "recurrent")
WINDOWED = tuple(case for case in WITH_STATES if case.info.n_swa)


@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_a_sequence_is_the_sum_of_its_blocks(case: Case, flash_attn: str, bench: MakeBench) -> None:
    # Transposed values, or not.
    b = bench(case, n_seq_max=3, flash_attn=flash_attn)
    tokens = b.feed(0, 21)
    b.ctx.native.set_blocks(1, *parts_of(b.ctx, 0, 21, window_first=0))
    b.held[1] = tokens.tolist()
    if flash_attn == "disabled":
        b.check(0, 1, n=3)
    else:
        one, other = (b.ctx.sequence_state(seq).parts for seq in (0, 1))
        for mine, theirs in zip(one, other, strict=True):
            for tensor, copied in zip(mine.tensors, theirs.tensors, strict=True):
                np.testing.assert_array_equal(tensor, copied)


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_cells_that_the_next_token_sees_are_enough(case: Case, bench: MakeBench) -> None:
    """For a window that has slid, in this context and in one of another shape."""
    b = bench(case, **LONG)
    tokens = b.feed(0, 400).tolist()
    b.feed(2, 60)
    parts = parts_of(b.ctx, 0, 400)
    b.ctx.native.set_blocks(1, *parts, known_values=True)
    b.held[1] = tokens.copy()
    b.check(0, 1, 2, n=2)
    b.feed(1, 40)
    b.check(1)
    for unified in (True, False):
        for swa_full in (True, False):
            if not (case.info.can_unify if unified else case.info.can_stream):
                continue
            other = bench(
                replace(case, unified=unified, swa_full=swa_full), n_ctx=1024, n_seq_max=2
            )
            other.ctx.native.set_blocks(1, *_moved(parts, other.ctx))
            # The very bytes: they depend on none of these options.
            *again, _, state = parts_of(other.ctx, 1, 400)
            for mine, theirs in zip(parts[:2], again, strict=True):
                for (one, *_), (two, *_) in zip(mine, theirs, strict=True):
                    np.testing.assert_array_equal(one, two)
            if state is not None:
                np.testing.assert_array_equal(state.content, parts[3].content)
            other.held[1] = tokens.copy()
            other.check(1, n=2)
            assert other.ctx.native.block_layout("window").cell_bytes == (
                b.ctx.native.block_bytes("window")
            )


def _moved(parts: Any, ctx: LlamaContext) -> Any:
    """The parts as another context takes them: a state by its bytes."""
    *others, state = parts
    if state is None:
        return parts
    return *others, ctx.native.make_state_part(state.content)


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_window_range_matches_the_cells(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG)
    native = b.ctx.native
    assert native.window_range(0) == (0, 0)
    rng = np.random.default_rng(3)
    for _ in range(14):
        seq = int(rng.integers(0, 3))
        try:
            b.feed(seq, int(rng.integers(1, 150)))
        except NoKvCacheSlot:
            b.ctx.clear_kv_cache_seq(seq)
            b.held[seq] = []
        if not rng.integers(0, 4):
            other = (seq + 1) % 3
            b.ctx.copy_kv_cache_seq(seq, other)
            b.held[other] = b.held[seq].copy()
        n = len(b.held.get(seq, []))
        if n and case.info.can_remove_partial and not rng.integers(0, 3):
            n -= int(rng.integers(0, min(n, 60)))
            if b.ctx.can_resume(seq, n) and b.ctx.clear_kv_cache_seq(seq, n or None):
                b.held[seq] = b.held[seq][:n]
        for seq, tokens in b.held.items():
            first, end = native.window_range(seq)
            assert end == len(tokens)
            assert first == _first_held(b.ctx, seq, end)
            # All of them come out as one block, and not one more.
            out = np.empty(native.block_bytes("window") * (end - first + 1), np.uint8)
            if end > first:
                assert native.get_block(seq, first, end - first, out, "window")
            if first:
                assert not native.get_block(seq, first - 1, end - first + 1, out, "window")
            # It says, too, how far the sequence can be cut.
            least = native.least_cut(first)
            for n in {0, 1, least - 1, least, least + 1, end - 1, end} & {*range(end + 1)}:
                if case.info.can_remove_partial:
                    assert b.ctx.can_resume(seq, n) == (n >= least or n == 0), (n, least)
                assert (native.window_needed(n) >= first) == (n >= least)
    b.check()


def _first_held(ctx: LlamaContext, seq: int, end: int) -> int:
    table = ctx.cells("window")
    held = {*table.pos[table.members[:, seq]].tolist()}
    first = end
    while first and first - 1 in held:
        first -= 1
    return first


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_spare_window_cells_are_restored_if_they_fit(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG, n_seq_max=2)
    native, n = b.ctx.native, 400
    tokens = b.feed(0, n).tolist()
    first, _ = native.window_range(0)
    parts = parts_of(b.ctx, 0, n, window_first=first)
    b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    for others in (0, 200):
        if others:
            b.feed(0, others)
        native.set_blocks(1, *parts)
        b.held[1] = tokens.copy()
        got, end = native.window_range(1)
        assert end == n
        assert first <= got <= native.window_needed(n)
        if case.swa_full or not others:
            # Also in a small cache: its old cells were its own, and others keep their window.
            assert got <= max(first, n - (224 if case.unified else 256))
        if case.info.can_remove_partial:
            left = native.least_cut(got)
            assert b.ctx.clear_kv_cache_seq(1, left)
            b.held[1] = tokens[:left]
        b.check(n=2)
        b.feed(0, 60)
        b.feed(1, 60)
        b.check()


@pytest.mark.parametrize("case", WITH_STATES, ids=str)
def test_parts_that_do_not_make_a_sequence_are_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case, n_seq_max=3)
    native, info = b.ctx.native, case.info
    b.feed(0, 70)
    before = b.ctx.get_state(0).tobytes()
    attention, window, first, state = parts_of(b.ctx, 0, 70)
    wrong: list[Any] = []
    if info.n_swa:
        data, n, used = window[0]
        one_less = [(data, n, used - 1), *window[1:]]
        wrong += [
            (attention, [], 70, state),
            (attention, window, first + 1, state),
            (attention, window[1:], first + SIZE, state),
            (attention, one_less, first + 1, state),
            (attention, one_less, first, state),
            (attention[:-1], window, first, state),
            ([], window, first, state),
        ]
        for bad in (-1, 2**31, "3"):
            with pytest.raises((ValueError, TypeError, OverflowError)):
                native.set_blocks(0, attention, window, bad, state)
    else:
        assert native.block_bytes("window") == 0
        assert not native.has_window
        wrong.append((attention, [(np.empty(0, np.uint8), 0, 0)], 0, state))
    if info.has_recurrent_state and attention:
        b.feed(1, 69)
        wrong += [
            (attention, window, first),
            (attention, window, first, native.get_state_part(1)),
            ([], [], 0, state),
        ]
    elif not info.has_recurrent_state:
        assert not native.has_state_part
        with pytest.raises(UnsupportedOperation):
            native.get_state_part(0)
    for parts in wrong:
        with pytest.raises(ArgumentError):
            native.set_blocks(0, *parts)
    assert b.ctx.get_state(0).tobytes() == before
    for part in ("keys", "", None, 1):
        with pytest.raises(ArgumentError, match="one of attention, window"):
            native.block_bytes(part)
    b.check()


@pytest.mark.parametrize("case", [c for c in WITH_STATES if c.info.has_recurrent_state], ids=str)
def test_a_state_part_survives_a_round_trip_and_knows_its_end(case: Case, bench: MakeBench) -> None:
    b = bench(case, **LONG)
    native = b.ctx.native
    assert native.get_state_part(0).end == 0
    assert native.make_state_part(native.get_state_part(0).content).end == 0
    b.feed(0, 33)
    state = native.get_state_part(0)
    assert (state.end, state.nbytes) == (33, len(state.content))
    assert not state.content.flags.writeable
    again = native.make_state_part(state.content.copy())
    assert again.end == 33
    np.testing.assert_array_equal(again.content, state.content)
    good = state.content.copy()
    for wrong in (good[:-1], good[:0], np.concatenate([good, good[:1]]), good[4:]):
        with pytest.raises(KvCacheError):
            native.make_state_part(wrong)
    spoiled = good.copy()
    spoiled[-4:] = 0xFF  # NaN, or the size of rows that have no bytes
    with pytest.raises(StateError):
        native.make_state_part(spoiled)
    with pytest.raises(TypeError):
        type(state)()
    b.check()


def test_only_the_used_cells_of_a_block_are_restored(bench: MakeBench) -> None:
    for case in WITH_STATES:
        if case.info.has_recurrent_state or not case.swa_full:
            continue
        b = bench(case, n_seq_max=3)
        tokens = b.feed(0, 20)
        attention, window, *_ = parts_of(b.ctx, 0, 20, window_first=0)
        cut = [
            [*blocks[:1], (blocks[1][0], SIZE, 3)] if blocks else []
            for blocks in (attention, window)
        ]
        b.ctx.native.set_blocks(1, *cut)
        b.held[1] = tokens[:11].tolist()
        b.check(0, 1, n=2)


def test_missing_cells_and_wrong_sizes_are_refused(bench: MakeBench) -> None:
    case = next(c for c in WITH_STATES if c.name == "llama" and c.unified)
    b = bench(case, n_seq_max=3)
    b.feed(0, 20)
    native = b.ctx.native
    cell = native.block_bytes()
    out = np.zeros(cell * SIZE, np.uint8)
    assert not native.get_block(0, 13, SIZE, out)
    assert not native.get_block(1, 0, 1, out)
    b.ctx.copy_kv_cache_seq(0, 2)
    b.ctx.clear_kv_cache_seq(2, 5, 7)
    assert not native.get_block(2, 0, SIZE, out), "with a gap"
    b.ctx.clear_kv_cache_seq(2)
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
    for part in ("attention", "window"):
        assert b.ctx.native.block_bytes(part) == 0
        with pytest.raises(UnsupportedOperation):
            b.ctx.native.get_block(0, 0, 1, np.zeros(8, np.uint8), part)
    assert b.ctx.native.window_range(0) == (0, 5)


@pytest.mark.parametrize("part", ["attention", "window"])
@pytest.mark.parametrize("case", WITH_CELLS, ids=str)
def test_values_are_checked_when_blocks_are_taken(case: Case, part: str, bench: MakeBench) -> None:
    """Blocks that were taken out are restored without a second check."""
    b = bench(case, n_seq_max=3)
    native = b.ctx.native
    if part == "window" and not native.has_window:
        return
    tokens = b.feed(0, 21)
    parts = parts_of(b.ctx, 0, 21, window_first=0)
    blocks = parts[0] if part == "attention" else parts[1]
    native.set_blocks(1, *parts, known_values=True)
    b.held[1] = tokens.tolist()
    b.check(1, n=2)
    one = np.empty(native.block_bytes(part) * SIZE, np.uint8)
    two = np.empty_like(one)
    assert native.get_blocks(0, 0, SIZE, [one, two], None, part)
    np.testing.assert_array_equal(one, blocks[0][0])
    np.testing.assert_array_equal(two, blocks[1][0])
    assert not native.get_blocks(0, 8, SIZE, [one, two], None, part)
    last = np.empty(native.block_bytes(part) * 5, np.uint8)
    alone = np.empty_like(last)
    two[:] = 0
    assert native.get_blocks(0, 0, SIZE, [one, two, last], 5, part)
    assert native.get_block(0, 2 * SIZE, 5, alone, part)
    np.testing.assert_array_equal(two, blocks[1][0])
    np.testing.assert_array_equal(last, alone)
    assert not native.get_blocks(0, 0, SIZE, [one, two, two], 6, part)
    if native.block_bytes(part):
        with pytest.raises(ArgumentError, match="6 cells need more"):
            native.get_blocks(0, 0, SIZE, [one, last], 6, part)
    with pytest.raises(ArgumentError, match="last"):
        native.get_blocks(0, 0, SIZE, [one, last], 0, part)
    # NaN that got into the cells all the same does not get out of them.
    spoiled = [blocks[0], (np.full_like(one, 0xFF), SIZE, SIZE)]
    if native.block_bytes(part) and not case.info.has_recurrent_state:
        whole = [blocks[:2] for blocks in parts[:2]]
        whole[part == "window"] = spoiled
        with pytest.raises(StateDamaged):
            native.set_blocks(2, *whole)
        native.set_blocks(2, *whole, known_values=True)
        assert native.get_block(2, 0, SIZE, one, part)
        with pytest.raises(StateDamaged, match="sequence 2"):
            native.get_blocks(2, 0, SIZE, [one, two], None, part)


@pytest.mark.parametrize("flash_attn", ["disabled", "enabled"])
@pytest.mark.parametrize("case", WITH_CELLS, ids=str)
def test_blocks_are_checked_without_the_memory(
    case: Case, flash_attn: str, bench: MakeBench
) -> None:
    """A layout says of values what the memory itself would, wherever in a block they are."""
    b = bench(case, n_seq_max=2, flash_attn=flash_attn)
    b.feed(0, 2 * SIZE)
    for part in ("attention", "window") if b.ctx.native.has_window else ("attention",):
        _check_layout(b, part)
    layout = b.ctx.native.block_layout()
    (data, *_), *_ = blocks_of(b.ctx, 0, SIZE)
    b.ctx.close()
    assert layout.is_good(data, SIZE)


def _check_layout(b: Bench, part: str) -> None:
    native = b.ctx.native
    layout = native.block_layout(part)
    parts = parts_of(b.ctx, 0, 2 * SIZE, window_first=0)
    data = parts[part == "window"][1][0]

    def is_refused() -> bool:
        try:
            native.set_blocks(1, *parts)
        except StateDamaged:
            return True
        return False

    assert layout.is_good(data, SIZE)
    assert not is_refused()
    rng = np.random.default_rng(3)
    # Other positions come before the values.
    first = 4 * SIZE if b.case.info.has_mrope and part == "attention" else 0
    n = len(data) // 4  # 0 where all layers have a window
    for at in (first, n - 1, *rng.integers(first, n, 20)) if n else ():
        values = data.view(np.uint32)
        kept, values[at] = values[at], 0x7F80FF80 if at % 2 else 0x7E007E00  # infinite, or NaN
        assert layout.is_good(data, SIZE) != is_refused(), at
        native.set_blocks(1, *parts, known_values=True)
        values[at] = kept
    more = np.concatenate([data, data[:1], [0]]).astype(np.uint8)
    for wrong in (data[:-1], data[:0], more):
        assert layout.is_good(wrong, SIZE) == (len(wrong) == len(data))
    assert layout.is_good(data[:0], 0)
    for n in (-1, 2**31):
        with pytest.raises(ValueError, match="n"):
            layout.is_good(data, n)


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
