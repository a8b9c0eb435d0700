"""What lies in the memory of a device is asked for in few requests, and is the same bytes.

Without a device the CPU's memory is treated as one: what is asked for, and in how many requests, is
the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kv.kit import different
from memory.kit import Make
from pykvcache import LlamaContext
from pykvcache._native import lib
from pykvcache.errors import NoKvCacheSlot, UnsupportedOperation
from support.builds import PLAIN, fast_only

FLASH = {"type_k": "f16", "type_v": "f16", "flash_attn": "enabled"}
SHAPES = [
    pytest.param("llama", {}, id="transposed"),
    pytest.param("llama", FLASH, id="rows"),
    pytest.param("llama_h64", {"type_k": "q8_0"}, id="quantised-transposed"),
    pytest.param("llama", FLASH | {"kv_unified": False, "n_ctx": 1024}, id="streams"),
    pytest.param("gemma3", {"swa_full": False, "n_ctx": 512}, id="window"),
    pytest.param("jamba", {}, id="hybrid"),
    pytest.param("mamba", {}, id="recurrent"),
]
shapes = pytest.mark.parametrize(("name", "options"), SHAPES)


@pytest.fixture(autouse=True)
def _hidden() -> Iterator[None]:
    lib.hide_host(True)
    yield
    lib.hide_host(False)


def asked(work: Callable[[], Any]) -> tuple[int, int]:
    before = lib.transfers()
    work()
    after = lib.transfers()
    return after[0] - before[0], after[1] - before[1]


def scattered(ctx: LlamaContext, n: int = 24, seed: int = 3) -> None:
    tokens = np.random.default_rng(seed).integers(5, 250, (n, 4)).astype(np.int32)
    for row in tokens:
        for seq_id in range(4):
            ctx.decode([row[seq_id]], seq_id=seq_id)
    ctx.clear_kv_cache_seq(3)


def contents(ctx: LlamaContext) -> list[bytes]:
    found = [ctx.get_state().tobytes(), *(ctx.get_state(s).tobytes() for s in range(3))]
    if ctx.native.has_state_part:
        found += [ctx.native.get_state_part(s).content.tobytes() for s in range(3)]
    if ctx.memory_kind != "recurrent":
        block = np.empty(ctx.native.block_bytes() * 20, np.uint8)
        assert ctx.native.get_block(1, 2, 20, block)
        found.append(block.tobytes())
    return found


@shapes
def test_what_is_read_is_what_the_cpu_reads(
    name: str, options: dict[str, Any], make_context: Make
) -> None:
    ctx = make_context(name, **options)
    scattered(ctx)
    hidden, arrays = contents(ctx), [ctx.kv(s) for s in range(3)]
    lib.hide_host(False)
    assert contents(ctx) == hidden
    for seq_id in range(3):
        assert different(ctx.kv(seq_id), arrays[seq_id]) == []


@pytest.mark.hazard("N85")
@shapes
def test_what_is_written_is_what_the_cpu_writes(
    name: str, options: dict[str, Any], make_context: Make
) -> None:
    ctx, other = (make_context(name, **options) for _ in range(2))
    for one in (ctx, other):
        scattered(one)
    # Into the holes, over what is there, of fewer cells and of more.
    short = make_context(name, **options)
    short.decode(np.arange(9, 20, dtype=np.int32))
    for state, seq_id in (
        (short.sequence_state(0), 3),
        (ctx.sequence_state(0), 1),
        (short.sequence_state(0), 0),
    ):
        before = [ctx.get_state(s).tobytes() for s in range(4) if s != seq_id]
        ctx.restore_sequence(state, seq_id)
        assert ctx.sequence_state(seq_id).to_bytes() == state.to_bytes()
        assert [ctx.get_state(s).tobytes() for s in range(4) if s != seq_id] == before
    other.set_state(ctx.get_state())
    ctx.write_kv(other.kv(1), 2)
    lib.hide_host(False)
    assert different(ctx.kv(2), other.kv(1)) == []
    for seq_id in (0, 1, 3):
        assert ctx.get_state(seq_id).tobytes() == other.get_state(seq_id).tobytes()


@pytest.mark.hazard("N53")
def test_a_view_is_refused_by_the_name_of_the_device(make_context: Make) -> None:
    ctx = make_context("llama")
    ctx.decode([5, 6])
    (where,) = ctx.memory_info.buffer_types
    with pytest.raises(
        UnsupportedOperation, match=re.escape(f"layer 0 lies in the memory of a device ({where})")
    ):
        ctx.kv(0, copy=False)


@fast_only("llama.cpp's reader places cells")
@pytest.mark.parametrize("options", [{}, FLASH], ids=["transposed", "rows"])
def test_each_tensor_is_asked_for_once(options: dict[str, Any], make_context: Make) -> None:
    """However the cells are scattered; a write over cells of others reads them first."""
    ctx = make_context("llama", **options)
    scattered(ctx)
    tensors = 2 * ctx.model.n_layer
    state, kv, whole = ctx.get_state(0), ctx.kv(0), ctx.get_state()
    saved = ctx.sequence_state(0)
    block = np.empty(ctx.native.block_bytes() * 20, np.uint8)
    four = [np.empty(ctx.native.block_bytes() * 5, np.uint8) for _ in range(4)]
    for read in (
        lambda: ctx.get_state(0),
        lambda: ctx.get_state(),
        lambda: ctx.sequence_state(1),
        lambda: ctx.context_state(),
        lambda: ctx.kv(2),
        lambda: ctx.native.get_block(1, 2, 20, block),
        lambda: ctx.native.get_blocks(1, 2, 5, four),
    ):
        assert asked(read) == (tensors, 0)
    for write in (
        lambda: ctx.set_state(state, 3),
        lambda: ctx.set_state(state, 3),
        lambda: ctx.restore_sequence(saved, 1),
        lambda: ctx.write_kv(kv, 2),
    ):
        n_read, n_written = asked(write)
        assert n_written == tensors
        assert n_read <= tensors
    n_read, n_written = asked(lambda: ctx.set_state(whole))
    # What was there is read, to be put back if the new state does not go in.
    assert n_read <= 2 * tensors
    assert n_written <= tensors
    lib.hide_host(False)
    if ctx.memory_info.buffer_types == ("CPU",):
        assert asked(lambda: ctx.set_state(state, 1)) == (0, 0)
    lib.hide_host(True)
    ctx.clear_kv_cache_seq(0)
    n_read, n_written = asked(lambda: ctx.kv_cache_compact())
    assert n_read <= 2 * tensors
    assert n_written == tensors


@fast_only("llama.cpp's reader places cells")
@pytest.mark.parametrize("even", [False, True], ids=["plain", "even"])
def test_runs_at_even_distances(even: bool, make_context: Make) -> None:
    """Transposed values of a run of cells, as devices take them that copy in two dimensions."""
    ctx, other = make_context("llama"), make_context("llama")
    ctx.decode(np.arange(9, 20, dtype=np.int32), seq_id=2)
    for seq_id in (0, 1):
        ctx.decode(
            np.random.default_rng(seq_id).integers(5, 250, 30).astype(np.int32), seq_id=seq_id
        )
    lib.hide_host(False)
    state, cells = ctx.get_state(1), ctx.kv(1)
    tensors = 2 * ctx.model.n_layer
    lib.hide_host(True, even)
    assert asked(lambda: ctx.get_state(1)) == (tensors, 0)
    assert ctx.get_state(1).tobytes() == state.tobytes()
    other.decode(np.arange(9, 20, dtype=np.int32), seq_id=2)
    kept = other.get_state(2).tobytes()
    n_read, n_written = asked(lambda: other.set_state(state, 1))
    assert n_written == tensors
    assert n_read == (0 if even or reads_even(ctx) else tensors // 2)
    lib.hide_host(False)
    assert different(other.kv(1), cells) == []
    assert other.get_state(2).tobytes() == kept


def reads_even(ctx: LlamaContext) -> bool:
    return ctx.memory_info.buffer_types[0].startswith(("CUDA", "Vulkan"))


@pytest.mark.hazard("N85")
@pytest.mark.skipif(PLAIN, reason="the plain build: llama.cpp's reader places cells")
def test_a_full_device_takes_a_state_in_the_place_of_another(make_context: Make) -> None:
    """Beside what a sequence holds where there is room, else over it."""
    ctx = make_context("llama", n_ctx=256, n_seq_max=2, **FLASH)
    tokens = np.random.default_rng(4).integers(5, 250, 200).astype(np.int32)
    ctx.decode(tokens[:100])
    first = ctx.get_state(0)
    ctx.clear_kv_cache_seq(0)
    ctx.decode(tokens)
    ctx.set_state(first, 0)  # 100 cells beside 200 do not fit
    assert ctx.get_state(0).tobytes() == first.tobytes()
    ctx.set_state(first, 1)
    ctx.set_state(first, 0)
    assert ctx.n_cells_used == 200
    ctx.decode(tokens[:50], seq_id=1)
    before = ctx.get_state().tobytes()
    with pytest.raises(NoKvCacheSlot):
        ctx.set_state(make_long(make_context, tokens), 0)
    assert ctx.get_state().tobytes() == before


def make_long(make_context: Make, tokens: np.ndarray[Any, Any]) -> Any:
    other = make_context("llama", n_ctx=256, n_seq_max=2, **FLASH)
    other.decode(tokens)
    return other.get_state(0)
