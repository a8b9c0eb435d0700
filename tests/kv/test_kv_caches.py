"""From a live context into the array caches of `pykvcache.arrays`, and back."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.kit import Make
from pykvcache import LlamaContext
from pykvcache.arrays import ArraysCache, FlatKVCache, KVCache, RotatingKVCache
from pykvcache.errors import CacheValueError
from pykvcache.kv import RecurrentState, SequenceKV, from_caches, to_caches
from state.kit import next_logits
from support.models import MODELS, RIGHT, usual

from .kit import N, different, words

ROOT = Path(__file__).parents[2]
NAMES = [n for n in usual(MODELS) if MODELS[n].has_arrays and not MODELS[n].has_mrope]


@pytest.fixture
def ctx(make_context: Make) -> LlamaContext:
    """A context that holds N tokens."""
    ctx = make_context("llama3l")
    ctx.decode(words(ctx.model))
    return ctx


@pytest.mark.parametrize("n", [5, N])
@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_the_same(name: str, n: int, make_context: Make) -> None:
    ctx = make_context(name)
    ctx.decode(words(ctx.model, n))
    arrays = ctx.kv(0)
    caches = to_caches(arrays, ctx.memory_info.n_swa or None)
    assert len(caches) == ctx.model.n_layer
    kinds = {type(cache) for cache in caches}
    assert (RotatingKVCache in kinds) == (arrays.window is not None)
    assert (ArraysCache in kinds) == (arrays.recurrent is not None)
    back = from_caches(caches, n_tokens=n)
    assert different(arrays, back) == []
    ctx.write_kv(back, 1)
    assert np.abs(next_logits(ctx, 0) - next_logits(ctx, 1)).max() < RIGHT


def test_numpy_goes_on_in_a_cache_and_llama_cpp_goes_on_from_it(ctx: LlamaContext) -> None:
    """The same tokens once in llama.cpp alone, once with a middle part in NumPy."""
    example: Any = runpy.run_path(str(ROOT / "examples" / "numpy_llama.py"))
    caches = to_caches(ctx.kv(0))
    more = words(ctx.model, 12, seed=8)
    here = example["Llama"](ctx.model.path).forward(
        more.tolist(), np.arange(N, N + 12), example["on_kv_caches"](caches)
    )
    ctx.write_kv(from_caches(caches), 1)
    ctx.decode(more)
    assert np.abs(here[-1] - ctx.logits()).max() < 0.01
    assert np.abs(next_logits(ctx, 0) - next_logits(ctx, 1)).max() < 0.01


def test_a_ring_that_was_written_round_is_put_in_order(ctx: LlamaContext) -> None:
    arrays = ctx.kv(0)
    layer = arrays.layers[0]
    keys, values = (np.asarray(x).transpose(1, 0, 2)[None] for x in (layer.keys, layer.values))
    ring = RotatingKVCache(20)
    for i in range(N):
        ring.update(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert ring.rotated
    window = from_caches([ring]).window
    assert window is not None
    assert window.positions.tolist() == list(range(N - 20, N))
    assert np.array_equal(window.layers[0].keys, layer.keys[-20:])
    assert np.array_equal(window.layers[0].values, layer.values[-20:])


def test_what_has_no_counterpart_is_refused(ctx: LlamaContext) -> None:
    arrays = ctx.kv(0)
    with pytest.raises(CacheValueError, match="gap"):
        to_caches(arrays.select(np.r_[0:5, 8:N]))
    with pytest.raises(CacheValueError, match="begins at 10"):
        to_caches(SequenceKV(np.empty(0, np.int32), [], recurrent=RecurrentState(17, [], 10)))
    with pytest.raises(CacheValueError, match="floats"):
        to_caches(
            replace(arrays, layers=[replace(arrays.layers[0], keys=np.ones((N, 2, 16), int))])
        )
    keys = arrays.layers[0].keys
    # Fewer rows than tokens made a cache of fewer tokens.
    for wrong in (keys[0], keys[None], keys[:-1], np.float32(1), [keys[0], keys[0][:1]]):
        layers = [replace(arrays.layers[0], keys=wrong)]
        with pytest.raises(CacheValueError, match="shape"):
            to_caches(replace(arrays, layers=layers))
        with pytest.raises(CacheValueError, match="shape"):
            to_caches(SequenceKV(arrays.positions, [], window=replace(arrays, layers=layers)), N)
    with pytest.raises(CacheValueError, match="window_size"):
        to_caches(SequenceKV(arrays.positions, [], window=arrays))
    with pytest.raises(CacheValueError, match="not fit window_size 20"):
        to_caches(SequenceKV(arrays.positions, [], window=arrays), 20)
    with pytest.raises(TypeError, match="FlatKVCache"):
        from_caches([FlatKVCache(1, 1, 1)])  # type: ignore[list-item]
    with pytest.raises(CacheValueError, match="empty"):
        from_caches([KVCache()])
    with pytest.raises(CacheValueError, match="n_tokens"):
        from_caches([ArraysCache(2)])
    long, short = to_caches(arrays)[0], to_caches(arrays)[1]
    assert isinstance(short, KVCache)
    short.trim(1)
    with pytest.raises(CacheValueError, match="different numbers"):
        from_caches([long, short])
    batch = KVCache()
    batch.update(np.ones((2, 1, 3, 4)), np.ones((2, 1, 3, 4)))
    with pytest.raises(CacheValueError, match="batch"):
        from_caches([batch])
    ring = RotatingKVCache(8, keep=2)
    for _ in range(10):
        ring.update(np.ones((1, 1, 1, 4)), np.ones((1, 1, 1, 4)))
    with pytest.raises(CacheValueError, match="keeps its first"):
        from_caches([ring])
