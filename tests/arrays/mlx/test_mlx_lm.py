"""Compared with mlx-lm 0.32 itself: files both ways, and random operations side by side.

Skipped where mlx-lm is not installed; `test_mlx_prompt_cache.py` has the layout's facts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykvcache.arrays as ours

REASON = 'mlx-lm is not installed: pip install "mlx[cpu]" "mlx-lm==0.32.*"'
mx = pytest.importorskip("mlx.core", reason=REASON)
mlx_lm = pytest.importorskip("mlx_lm", reason=REASON)
pytest.importorskip("safetensors")
theirs = pytest.importorskip("mlx_lm.models.cache", reason=REASON)
if tuple(map(int, mlx_lm.__version__.split(".")[:2])) < (0, 32):
    pytest.skip(f"mlx-lm is {mlx_lm.__version__}: 0.32 is needed", allow_module_level=True)

Pair = tuple[Any, Any]  # their cache and ours, with the same content


def tokens(rng: np.random.Generator, rows: int, n: int) -> Pair:
    shape = (rows, 2, n, 32)
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)


def fed(rng: np.random.Generator, pair: Pair, n: int) -> Pair:
    rows = getattr(pair[1], "batch_size", 1)
    keys, values = tokens(rng, rows, n)
    pair[0].update_and_fetch(mx.array(keys), mx.array(values))
    pair[1].update(keys, values)
    return pair


def filled(rng: np.random.Generator, pair: Pair, rows: int) -> Pair:
    array = rng.normal(size=(rows, 3)).astype(np.float32)
    pair[0][0], pair[1][0] = mx.array(array), array
    return pair


def made(name: str, *args: Any) -> Pair:
    return getattr(theirs, name)(*args), getattr(ours, name)(*args)


def listed(*pairs: Pair) -> Pair:
    members = list(zip(*pairs, strict=True))
    return theirs.CacheList(*members[0]), ours.CacheList(*members[1])


def contents() -> dict[str, Pair]:
    rng = np.random.default_rng(3)
    pairs = {
        "KVCache, empty": made("KVCache"),
        "KVCache": fed(rng, made("KVCache"), 5),
        "ConcatenateKVCache": fed(rng, made("ConcatenateKVCache"), 5),
        "RotatingKVCache, empty": made("RotatingKVCache", 4),
        "ChunkedKVCache, empty": made("ChunkedKVCache", 4),
        "ChunkedKVCache": fed(rng, made("ChunkedKVCache", 4), 3),
        "QuantizedKVCache, empty": made("QuantizedKVCache", 32, 8),
        "ArraysCache, empty": made("ArraysCache", 2),
        "ArraysCache": filled(rng, made("ArraysCache", 2, [1, 2]), 2),
        "BatchKVCache, empty": made("BatchKVCache", [0, 2]),
        "BatchKVCache": fed(rng, made("BatchKVCache", [0, 2]), 4),
        "BatchRotatingKVCache, empty": made("BatchRotatingKVCache", 4, [0, 2]),
    }
    for n in (1, 3, 9):
        pairs[f"RotatingKVCache, {n}"] = fed(rng, made("RotatingKVCache", 6, 1), n)
        pairs[f"BatchRotatingKVCache, {n}"] = fed(rng, made("BatchRotatingKVCache", 4, [0, 2]), n)
    for name, args in (("RotatingKVCache", (4, 0)), ("BatchRotatingKVCache", (4, [0, 2]))):
        pair = made(name, *args)
        for _ in range(7):
            fed(rng, pair, 1)
        pairs[f"{name}, rotated"] = pair
    inner = listed(fed(rng, made("KVCache"), 2), made("RotatingKVCache", 4))
    pairs["CacheList"] = listed(filled(rng, made("ArraysCache", 1), 1), inner)
    return pairs


def plain(array: Any) -> Any:
    return None if array is None else np.array(array)


def same(their: Any, our: Any) -> None:
    assert (their is None) == (our is None)
    if their is not None:
        np.testing.assert_array_equal(plain(their), our)


def go_on(their: Any, our: Any) -> None:
    """The same comes out of both after the next tokens."""
    if isinstance(our, ours.CacheList):
        for pair in zip(their.caches, our, strict=True):
            go_on(*pair)
        return
    if isinstance(our, ours.ArraysCache):
        for array, mine in zip(their.cache, (our[i] for i in range(len(our))), strict=True):
            same(array, mine)
        same(their.left_padding, our.left_padding)
        same(their.lengths, our.lengths)
        same(their.make_mask(3), our.make_mask(3))
        return
    assert plain(their.offset).tolist() == np.asarray(our.rope_offset).tolist()
    if isinstance(our, ours.QuantizedKVCache):
        assert (their.group_size, their.bits) == (our.group_size, our.bits)
        for half, mine in zip((their.keys, their.values), our.quantized_state or (), strict=False):
            for array, part in zip(half, mine, strict=True):
                same(plain(array)[:, :, : our.offset], part)
        return
    if isinstance(our, ours.BatchRotatingKVCache) and not hasattr(their, "_lengths"):
        their._lengths = None  # mlx-lm 0.32 does not set it on loaded caches
    rows = our.state[0].shape[0] if our.state else getattr(our, "batch_size", 1)
    rng = np.random.default_rng(1)
    for n in (1, 1, 3, 1):
        keys, values = tokens(rng, rows, n)
        out = their.update_and_fetch(mx.array(keys), mx.array(values))
        for array, mine in zip(out, our.update(keys, values), strict=True):
            same(array, mine)


QUANTIZED = ("QuantizedKVCache, 4", "QuantizedKVCache, 8")


@pytest.mark.parametrize("name", [*contents(), *QUANTIZED])
def test_files_go_both_ways(name: str, tmp_path: Path) -> None:
    """Each side loads the files of the other."""
    file = str(tmp_path / "c.safetensors")
    if name in QUANTIZED:  # the codes that ours chose, since roundings differ
        our = ours.QuantizedKVCache(32, int(name[-1]))
        our.update(*tokens(np.random.default_rng(2), 1, 3))
        ours.save_prompt_cache(file, [our])
        their = theirs.load_prompt_cache(file)[0]
        kept = mx.dequantize(*their.keys, group_size=32, bits=our.bits)
        np.testing.assert_allclose(
            kept, our.copy().update(*tokens(np.random.default_rng(2), 1, 3))[0][:, :, :3], atol=1e-6
        )
    else:
        their, our = contents()[name]
    ours.save_prompt_cache(file, [our.copy(), our.copy()], {"model": "m"})
    loaded, metadata = theirs.load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "m"}
    assert [type(cache) for cache in loaded] == [type(their)] * 2
    go_on(loaded[0], our.copy())
    ours.save_prompt_cache(file, [our.copy()])
    assert len(theirs.load_prompt_cache(file)) == 1
    theirs.save_prompt_cache(file, [their], {"model": "m", "a": "b"})
    assert ours.prompt_cache_layout(file) == "0.32"
    back, texts = ours.load_prompt_cache(file, return_metadata=True)
    assert texts == {"model": "m", "a": "b"}
    go_on(their if name in QUANTIZED else copy.deepcopy(their), back[0])


def test_the_older_layout_is_not_read_by_it(tmp_path: Path) -> None:
    """The reason for the new layout: mlx-lm takes an older file of one layer for none."""
    file = str(tmp_path / "c.safetensors")
    ours.save_prompt_cache(file, [ours.KVCache()], layout="0.31")
    assert theirs.load_prompt_cache(file) == []


@pytest.mark.parametrize("seed", range(30))
def test_recurrent_caches_side_by_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 3
    parts = [made("ArraysCache", 1) for _ in range(rows)]
    for pair in parts[:: rng.integers(1, 3)]:
        if rng.random() < 0.5:
            filled(rng, pair, 1)
    their = theirs.ArraysCache.merge([pair[0] for pair in parts])
    our = ours.ArraysCache.merge([pair[1] for pair in parts])
    for _ in range(8):
        step = rng.choice(["prepare", "advance", "finalize", "filter", "fill", "mask"])
        if step == "prepare":
            lengths = rng.integers(0, 5, size=rows).tolist()
            for cache in (their, our):
                cache.prepare(lengths=lengths, right_padding=[4 - n for n in lengths])
        elif step == "advance":
            n = int(rng.integers(1, 4))
            their.advance(n)
            our.advance(n)
        elif step == "finalize":
            their.finalize()
            our.finalize()
        elif step == "filter":
            kept = rng.permutation(rows)[: rng.integers(1, rows + 1)].tolist()
            their.filter(mx.array(kept))
            our.filter(kept)
            rows = len(kept)
        elif step == "fill":
            filled(rng, (their, our), rows)
        same(their.make_mask(4), our.make_mask(4))
        same(their[0], our[0])
        assert their.nbytes == our.nbytes


@pytest.mark.parametrize("seed", range(30))
def test_lists_side_by_side(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = made("BatchKVCache", [0, 0]) if seed % 2 else made("BatchRotatingKVCache", 6, [0, 0])
    their, our = listed(made("ArraysCache", 1), batch)
    for _ in range(10):
        step, rows = rng.choice(["fill", "feed", "filter", "prompt"]), our[1].batch_size
        if step == "fill":
            filled(rng, (their[0], our[0]), rows)
        elif step == "feed":
            fed(rng, (their[1], our[1]), int(rng.choice([1, 1, 4])))
        elif step == "filter":
            kept = rng.integers(0, rows, size=rng.integers(1, 4)).tolist()
            their.filter(mx.array(kept))
            our.filter(kept)
        else:
            lengths = rng.integers(1, 5, size=rows).tolist()
            for cache in (their, our):
                cache.prepare(lengths=lengths, right_padding=[4 - n for n in lengths])
            same(their[0].make_mask(4), our[0].make_mask(4))
            fed(rng, (their[1], our[1]), 4)
            their.finalize()
            our.finalize()
        same(their[0][0], our[0][0])
        assert their.size() == our.size()
        assert their.empty() == our.is_empty()
        assert their.is_trimmable() == our.is_trimmable()


@pytest.mark.parametrize("name", ["RotatingKVCache", "BatchRotatingKVCache"])
@pytest.mark.parametrize("seed", range(10))
def test_rings_side_by_side(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.choice([2, 4, 6, 300]))
    pair = made(name, size, *([[0, 2]] if name.startswith("Batch") else []))
    for n in rng.choice([1, 1, 1, 2, 5, 9], size=15).tolist():
        keys, values = tokens(rng, getattr(pair[1], "batch_size", 1), n)
        out = pair[0].update_and_fetch(mx.array(keys), mx.array(values))
        for array, mine in zip(out, pair[1].update(keys, values), strict=True):
            same(array, mine)
        assert pair[0].size() == pair[1].size()
        column = 2 * 4 * pair[1].state[0][:, :, :1].size
        assert pair[1].nbytes <= max(pair[0].nbytes, column * size)


@pytest.mark.parametrize("seed", range(20))
def test_prompt_caches_side_by_side(seed: int) -> None:
    """Ours finds at least as much as mlx-lm's."""
    rng = np.random.default_rng(seed)
    lru = theirs.LRUPromptCache(100), ours.LRUPromptCache(100)
    for _ in range(12):
        ids = rng.integers(1, 3, size=rng.integers(1, 6)).tolist()
        if rng.random() < 0.5:
            pair = made("KVCache") if rng.random() < 0.7 else made("RotatingKVCache", 4)
            rows = np.array(ids, np.float32)[None, None, :, None] * np.ones(
                (1, 2, 1, 4), np.float32
            )
            pair[0].update_and_fetch(mx.array(rows), mx.array(rows))
            pair[1].update(rows, rows)
            lru[0].insert_cache("m", ids, [pair[0]])
            lru[1].insert_cache("m", ids, [pair[1]])
            assert len(lru[1]) == len(lru[0])
            continue
        (found, rest), (mine, left) = (cache.fetch_nearest_cache("m", ids) for cache in lru)
        assert len(left) <= len(rest)
        if found is None:
            continue
        assert mine is not None
        assert mine[0].offset == len(ids) - len(left)
        if left == rest:
            same(
                found[0].keys[:, :, : found[0].offset],
                mine[0].state[0] if mine[0].state else found[0].keys[:, :, :0],
            )
