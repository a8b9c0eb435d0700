"""Keys and values that were computed apart, pasted one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pykvcache import LlamaContext
from pykvcache.errors import ArgumentError, UnsupportedOperation
from pykvcache.kv import SequenceKV
from support.models import RIGHT

A, B = np.arange(20, 60, dtype=np.int32), np.arange(90, 115, dtype=np.int32)

Make = Callable[..., LlamaContext]


def taken(ctx: LlamaContext, tokens: np.ndarray[Any, Any]) -> SequenceKV:
    ctx.clear_kv_cache()
    ctx.decode(tokens)
    return ctx.kv(0, rope=False)


@pytest.fixture(params=["llama", "gemma3"])
def ctx(request: pytest.FixtureRequest, make_context: Make) -> LlamaContext:
    return make_context(request.param)


def test_what_was_cut_and_joined_is_what_it_was(ctx: LlamaContext) -> None:
    ctx.decode(A)
    ctx.copy_kv_cache_seq(0, 1)
    ctx.decode([7])
    right = ctx.logits()
    whole = ctx.kv(1, rope=False)
    if whole.window is None:
        pieces = [whole.select(range(k, k + 8)) for k in range(0, 40, 8)]
    else:
        pieces = [whole]
    ctx.write_kv(SequenceKV.concat(pieces), 1)
    ctx.decode([7], seq_id=1)
    assert np.abs(ctx.logits() - right).max() < RIGHT


def test_the_first_layer_is_that_of_a_fresh_run_in_any_order(ctx: LlamaContext) -> None:
    a, b = taken(ctx, A), taken(ctx, B)
    for parts, tokens in (((a, b), (A, B)), ((b, a), (B, A)), ((b, b), (B, B))):
        joined = SequenceKV.concat(parts)
        fresh = taken(ctx, np.concatenate(tokens))
        assert joined.positions.tolist() == list(range(len(fresh)))
        for mine, right in zip(joined.layers, fresh.layers, strict=True):
            if right.layer == 0:  # it depends on the token alone
                assert np.abs(mine.keys - right.keys).max() < RIGHT
                assert np.abs(mine.values - right.values).max() < RIGHT
        # The first part is exact in all layers: nothing came before it.
        n = len(tokens[0])
        for mine, right in zip(joined.layers, fresh.layers, strict=True):
            assert np.abs(mine.values[:n] - right.values[:n]).max() < RIGHT
        ctx.write_kv(joined, 1)
        ctx.decode([7], seq_id=1)
        assert np.isfinite(ctx.logits()).all()


def test_parts_may_begin_anywhere(ctx: LlamaContext) -> None:
    a = taken(ctx, A)
    joined = SequenceKV.concat([a], first=30)
    assert joined.positions.tolist() == list(range(30, 70))
    ctx.write_kv(joined, 1)
    assert ctx.kv_cache_seq_pos_max(1) == 69


def test_what_cannot_be_joined_is_refused(make_context: Make) -> None:
    ctx = make_context("llama")
    a = taken(ctx, A)
    with pytest.raises(ArgumentError, match="no part"):
        SequenceKV.concat([])
    with pytest.raises(ArgumentError, match="rotated"):
        SequenceKV.concat([a, ctx.kv(0)])
    with pytest.raises(TypeError):
        SequenceKV.concat([a, 3])  # type: ignore[list-item]
    other = taken(make_context("llama3l"), A)
    with pytest.raises(ArgumentError, match="layers"):
        SequenceKV.concat([a, other])
    for name in ("mamba2", "jamba"):
        hybrid = make_context(name)
        with pytest.raises(UnsupportedOperation, match="recurrent"):
            SequenceKV.concat([taken(hybrid, A)])
    mrope = make_context("qwen2vl")
    with pytest.raises(UnsupportedOperation, match="M-RoPE"):
        SequenceKV.concat([taken(mrope, A)])
