"""Memories that index their cells, or keep compressed copies of them beside the window.

They take whole sequences only: `test_recurrent.py` and the equivalence tests run on them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from memory.kit import EVERY_CASE, Bench, Case
from pykvcache import LlamaBatch, LlamaContext
from pykvcache.errors import ContextCreateError, InvalidBatch, NoKvCacheSlot, UnsupportedOperation
from support.models import MODELS

MakeBench = Callable[..., Bench]
bounded_case = pytest.mark.parametrize("case", [c for c in EVERY_CASE if c.info.bounded], ids=str)

CLASSES = {
    "deepseek32": "llama_kv_cache_dsa",
    "dots3note": "llama_kv_cache_dsa_iswa",
    "minimax_m3": "llama_kv_cache_msa",
    "deepseek4": "llama_kv_cache_dsv4",
    "qwen4exp": "llama_memory_hybrid_idx",
    "glm5_next": "llama_memory_hybrid_idx",
}


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_known_by_its_name(make_context: Any, name: str) -> None:
    info = make_context(name).memory_info
    assert info.class_name == CLASSES[name]
    assert info.n_cells > 0
    assert info.bytes_per_token > 0
    assert not info.can_shift
    assert info.can_copy_partial == info.can_remove_partial == MODELS[name].can_remove_partial


@pytest.mark.hazard("D16")
@bounded_case
def test_positions_begin_at_0_and_end_with_the_context(case: Case, bench: MakeBench) -> None:
    # Elsewhere an assertion, or memory for all positions up to this one.
    b = bench(case)
    for start in (1, 5, 255, 256, 100_000, 2**31 - 100):
        with pytest.raises(InvalidBatch):
            b.ctx.decode(LlamaBatch.from_arrays([7, 8], [start, start + 1], 1))
    n = b.ctx.n_ctx_seq
    b.feed(0, 30)
    with pytest.raises(NoKvCacheSlot, match=str(n)):
        b.ctx.decode(b.prompt(n - 29))
    b.check()
    b.feed(0, n - len(b.held[0]))
    with pytest.raises(NoKvCacheSlot):
        b.ctx.decode([7])
    b.positions()
    assert b.ctx.clear_kv_cache_seq(0)
    b.held[0] = []
    b.feed(0, 20)
    b.check()


@pytest.mark.hazard("D18", "D19")
@bounded_case
def test_a_token_of_several_sequences_is_refused(case: Case, bench: MakeBench) -> None:
    b = bench(case)
    b.feed(0, 10)
    both = np.tile(np.array([1, 2], np.int32), (3, 1))
    with pytest.raises(UnsupportedOperation):
        b.ctx.decode(LlamaBatch.from_arrays([7, 8, 9], np.arange(3), both))
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1] = b.held[0].copy()
    with pytest.raises(UnsupportedOperation):
        b.ctx.decode(LlamaBatch.from_arrays([7], [10], np.array([[0, 1]], np.int32)))
    b.check()


@bounded_case
def test_keys_alone_are_refused_and_states_of_an_unknown_layout(
    case: Case, bench: MakeBench
) -> None:
    b = bench(case)
    b.feed(0, 10)
    with pytest.raises(UnsupportedOperation, match="layout"):
        b.ctx.kv(0)
    if not case.has_states:
        with pytest.raises(UnsupportedOperation, match="layout"):
            b.ctx.get_state(0)
    b.check()


@pytest.mark.hazard("N25")
@bounded_case
def test_a_copy_does_not_depend_on_what_happens_to_its_source(case: Case, bench: MakeBench) -> None:
    # Compressed rows of a removed source are cleared at once, pending copies come later.
    b = bench(case)
    b.feed(0, 40)
    b.ctx.copy_kv_cache_seq(0, 1)
    b.held[1], b.held[0] = b.held[0], []
    assert b.ctx.clear_kv_cache_seq(0)
    b.ctx.copy_kv_cache_seq(1, 2)
    b.held[2] = b.held[1].copy()
    b.feed(0, 7)
    b.check(n=2)


@pytest.mark.hazard("N26")
def test_blocks_of_cells_need_a_pool_for_each_sequence(model: Any) -> None:
    one = model("qwen4exp")
    with pytest.raises(ContextCreateError, match="kv_unified=False"):
        LlamaContext(one, n_ctx=256, n_seq_max=2, n_threads=1)
    with LlamaContext(one, n_ctx=256, n_seq_max=1, n_threads=1) as ctx:
        ctx.decode([5, 6, 7])
        assert ctx.memory_info.kv_unified
