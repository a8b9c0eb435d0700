"""What the issue settles about quantised caches, files and prompt caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_kit import (
    SINGLE,
    feed,
    filled,
    same_state,
    tokens_in,
    wide,
)
from safetensors import safe_open

from pykvcache.arrays import (
    ROTATING_DEFAULT_KEEP,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    LRUPromptCache,
    MambaCache,
    PromptCacheConfig,
    PromptTrie,
    QuantizedKVCache,
    RotatingKVCache,
    TokenBuffer,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from pykvcache.errors import KvCacheError

# Quantisation -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantisation_errs_by_half_a_step(bits: int, group_size: int) -> None:
    cache: Any = QuantizedKVCache(group_size, bits)
    stored: list[list[Any]] = [[], []]
    for count, seed in ((5, 1), (1, 2), (300, 3)):
        new = wide(count, seed, dim=128) * 3 + 1, wide(count, seed + 9, dim=256)
        for kept, array in zip(stored, new, strict=True):
            kept.append(array)
        out = cache.update(*new)
    for kept, array in zip(stored, out, strict=True):
        exact = np.concatenate(kept, axis=2)
        groups = exact.reshape(*exact.shape[:3], -1, group_size).astype(np.float64)
        step = (groups.max(-1) - groups.min(-1)) / (2**bits - 1)
        error = np.abs(groups - array.reshape(groups.shape)).max(-1)
        assert (error <= step / 2 * (1 + 1e-4) + 1e-6).all()
    (codes, scales, biases), values = cache.quantized_state
    assert codes.dtype == np.uint32
    assert codes.shape == (1, 2, 306, 128 * bits // 32)
    assert scales.shape == biases.shape == (1, 2, 306, 128 // group_size)
    assert values[0].shape[-1] == 256 * bits // 32


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_codes_are_a_little_endian_bit_stream(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 64)
    codes[0], codes[32] = 0, 0
    codes[1], codes[33] = 2**bits - 1, 2**bits - 1  # so that the codes come out as they are
    cache = QuantizedKVCache(32, bits)
    array = codes.astype(np.float32).reshape(1, 1, 1, 64)
    (packed, scales, biases), _ = cache.update_quantized(array, array)
    stream = np.unpackbits(packed.ravel().astype("<u4").view(np.uint8), bitorder="little")
    got = stream.reshape(64, bits) @ (1 << np.arange(bits))
    # A scale may be negative: the code then counts down from the maximum.
    value = got.reshape(2, 32) * scales.reshape(2, 1) + biases.reshape(2, 1)
    np.testing.assert_allclose(value.ravel(), codes, atol=0.01)
    assert set(np.unique(np.abs(scales))) == {1.0}


@pytest.mark.parametrize(
    ("group_size", "bits"), [(64, 5), (64, 0), (64, 16), (0, 8), (-1, 8), (64, True), (64.0, 8)]
)
def test_wrong_quantisations_are_refused(group_size: Any, bits: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        QuantizedKVCache(group_size, bits)
    with pytest.raises((KvCacheError, TypeError)):
        filled("KVCache").to_quantized(group_size, bits)


def test_head_sizes_that_groups_do_not_divide_are_refused() -> None:
    cache = QuantizedKVCache(64, 8)
    with pytest.raises(KvCacheError):
        cache.update(wide(1, dim=96), wide(1, dim=96))
    assert cache.is_empty() is True
    assert cache.quantized_state is None


def test_quantising_a_cache() -> None:
    cache = filled("KVCache", 5)
    quantised = cache.to_quantized(group_size=32, bits=8)
    assert isinstance(quantised, QuantizedKVCache)
    assert (quantised.group_size, quantised.bits, quantised.offset) == (32, 8, 5)
    assert tuple(quantised.meta_state) == ("5", "32", "8")
    keys, _ = quantised.update(wide(1, 9), wide(1, 9))
    assert keys.shape[2] == 6
    np.testing.assert_allclose(keys[:, :, :5], cache.state[0], atol=0.05)
    assert KVCache().to_quantized(32, 4).is_empty() is True


# Files --------------------------------------------------------------------------------------


def test_files_of_every_kind(tmp_path: Path) -> None:
    batch, ring = BatchKVCache([0, 1]), BatchRotatingKVCache(3, [1, 0])
    for cache in (batch, ring):
        feed(cache, [[1, 2], [3, 4]])
    mamba = MambaCache()
    mamba[0] = np.ones((1, 2), np.float32)
    caches = [
        *(filled(name) for name in SINGLE),
        *(SINGLE[name]() for name in SINGLE),
        batch,
        ring,
        mamba,
        CacheList(filled("KVCache"), CacheList(filled("RotatingKVCache", 9), MambaCache())),
    ]
    file = tmp_path / "all.safetensors"
    save_prompt_cache(str(file), caches, {"model": "tiny", "ünïcode": "ja"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)
    assert metadata == {"model": "tiny", "ünïcode": "ja"}
    assert len(load_prompt_cache(file)) == len(caches)
    for before, after in zip(caches, loaded, strict=True):
        same_state(before, after)
        if not isinstance(before, ConcatenateKVCache):
            assert type(before) is type(after)
        else:
            assert type(after) is KVCache


def test_files_are_laid_out_as_mlx_lm_flattens_them(tmp_path: Path) -> None:
    file = tmp_path / "cache.safetensors"
    caches = [filled("KVCache"), filled("RotatingKVCache", 8)]
    save_prompt_cache(file, caches, {"model": "tiny"}, layout="0.31")
    with safe_open(file, "np") as opened:
        names, metadata = set(opened.keys()), opened.metadata()
        np.testing.assert_array_equal(opened.get_tensor("0.1"), caches[0].state[1])
    assert names == {"0.0", "0.1", "1.0", "1.1"}
    keep, size, offset, index = caches[1].meta_state
    assert metadata == {
        "0.0": "",
        "0.1.0": keep,
        "0.1.1": size,
        "0.1.2": offset,
        "0.1.3": index,
        "1.model": "tiny",
        "2.0": "KVCache",
        "2.1": "RotatingKVCache",
    }


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        load_prompt_cache(tmp_path / "nowhere.safetensors")
    file = tmp_path / "cache.safetensors"
    save_prompt_cache(file, [filled("KVCache"), filled("RotatingKVCache", 9)])
    data = file.read_bytes()
    for damaged in (b"", b"not a cache", data[:40], data[: len(data) // 2], b"\xff" * 100):
        file.write_bytes(damaged)
        with pytest.raises(KvCacheError):
            load_prompt_cache(file)
    size = int.from_bytes(data[:8], "little")
    for old, new in ((b"RotatingKVCache", b"RotatingKVCachX"), (b'"2"', b'"z"')):
        if old in data[: 8 + size]:
            file.write_bytes(data.replace(old, new))
            with pytest.raises(KvCacheError):
                load_prompt_cache(file)


# Prompt caches ------------------------------------------------------------------------------


def test_prompt_caches_from_a_config() -> None:
    plain = make_prompt_cache(PromptCacheConfig(3))
    assert [type(cache) for cache in plain] == [KVCache] * 3
    rings: Any = make_prompt_cache(PromptCacheConfig(num_hidden_layers=2, sliding_window=16))
    assert [(type(c), c.max_size, c.keep) for c in rings] == [(RotatingKVCache, 16, 4)] * 2
    assert ROTATING_DEFAULT_KEEP == 4
    assert plain[0] is not plain[1]
    assert make_prompt_cache(PromptCacheConfig(0)) == []


def test_trimming_prompt_caches_is_all_or_nothing() -> None:
    caches = [filled("KVCache", 5), filled("KVCache", 5)]
    assert can_trim_prompt_cache(caches) is True
    assert trim_prompt_cache(caches, 2) == 2
    assert [cache.offset for cache in caches] == [3, 3]
    mixed = [filled("KVCache", 5), filled("RotatingKVCache", 9)]
    assert can_trim_prompt_cache(mixed) is False
    assert trim_prompt_cache(mixed, 2) == 0
    assert mixed[0].offset == 5
    with pytest.raises(KvCacheError):
        trim_prompt_cache(caches, -1)
    assert trim_prompt_cache([], 3) == 0


def test_a_token_buffer() -> None:
    buffer = TokenBuffer([1, 2])
    assert buffer.update([3]).tolist() == [1, 2, 3]
    for token in range(4, 600):
        buffer.update([token])
    assert len(buffer) == 599
    assert buffer.tokens.tolist() == list(range(1, 600))
    assert TokenBuffer().update([]).tolist() == []


def test_the_trie() -> None:
    trie: PromptTrie[str] = PromptTrie()
    trie.add("m", [1, 2, 3], "a")
    trie.add("m", [1], "b")
    trie.add("other", [1, 2], "c")
    assert trie.get("m", [1, 2, 3]) == "a"
    found = trie.search("m", [1, 2, 3, 4])
    assert found.exact is None
    assert found.shorter == [1, 2, 3]
    found = trie.search("m", [1, 2])
    assert found.shorter == [1]
    assert found.longer == [1, 2, 3]
    assert found.common_prefix == 2
    assert trie.search("m", [1]).exact == [1]
    assert trie.search("m", [9]).shorter is None
    assert [value for _, value in trie.pop_prefixes("m", [1, 2, 3])] == ["b"]
    assert trie.pop("m", [1, 2, 3]) == "a"
    assert trie.search("m", [1, 2, 3]).exact is None
    assert trie.get("other", [1, 2]) == "c"


def entry(*tokens: int) -> list[Any]:
    cache = KVCache()
    feed(cache, [list(tokens)])
    return [cache]


def contents(caches: list[Any] | None) -> Any:
    assert caches is not None
    return tokens_in(*caches[0].state)[0].tolist()


def test_the_nearest_cache_is_found_and_trimmed() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2, 3, 4, 5], entry(1, 2, 3, 4, 5))
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 4, 5])
    assert contents(caches) == [1, 2, 3, 4, 5]
    assert rest == []
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 9, 9])
    assert contents(caches) == [1, 2, 3]
    assert rest == [9, 9]
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3])
    assert contents(caches) == [1, 2]  # one token is left to evaluate
    assert rest == [3]
    caches, rest = lru.fetch_nearest_cache("m", [1, 2, 3, 4, 5, 6])
    assert contents(caches) == [1, 2, 3, 4, 5]
    assert rest == [6]
    assert lru.fetch_nearest_cache("m", [7]) == (None, [7])
    assert lru.fetch_nearest_cache("other", [1, 2]) == (None, [1, 2])


def test_a_one_token_prefix_matches() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1], entry(1))
    caches, rest = lru.fetch_nearest_cache("m", [1, 2])
    assert contents(caches) == [1]
    assert rest == [2]


def test_every_hit_refreshes() -> None:
    lru = LRUPromptCache(max_size=2)
    lru.insert_cache("m", [1, 1], entry(1, 1))
    lru.insert_cache("m", [2, 2], entry(2, 2))
    lru.fetch_nearest_cache("m", [1, 1, 5])  # a hit on the older one, as a prefix
    lru.insert_cache("m", [3, 3], entry(3, 3))
    assert lru.fetch_nearest_cache("m", [2, 2])[0] is None
    assert contents(lru.fetch_nearest_cache("m", [1, 1])[0]) == [1, 1]
    lru.fetch_nearest_cache("m", [3, 9])  # and as a longer one
    lru.insert_cache("m", [4, 4], entry(4, 4))
    assert lru.fetch_nearest_cache("m", [1, 1])[0] is None
    assert len(lru) == 2


def test_entries_are_isolated() -> None:
    lru = LRUPromptCache()
    given = entry(1, 2)
    lru.insert_cache("m", [1, 2], given)
    caches, _ = lru.fetch_nearest_cache("m", [1, 2])
    assert caches is not None
    feed(caches[0], [[9]])
    caches[0].trim(2)
    caches.clear()
    assert contents(lru.fetch_nearest_cache("m", [1, 2])[0]) == [1, 2]


def test_bytes_are_limited() -> None:
    size = entry(1, 2)[0].nbytes
    lru = LRUPromptCache(max_size=10, max_bytes=2 * size)
    for token in (1, 2, 3):
        lru.insert_cache("m", [token, token], entry(token, token))
    assert len(lru) == 2
    assert lru.nbytes <= 2 * size
    assert lru.fetch_nearest_cache("m", [1, 1])[0] is None
    lru.trim_to(n_sequences=1)
    assert len(lru) == 1
    assert contents(lru.fetch_nearest_cache("m", [3, 3])[0]) == [3, 3]
    lru.trim_to(n_bytes=0)
    assert len(lru) == 0


def test_inserting_removes_what_it_can_replace() -> None:
    lru = LRUPromptCache()
    lru.insert_cache("m", [1, 2], entry(1, 2))
    lru.insert_cache("m", [1, 2, 3], entry(1, 2, 3))
    assert len(lru) == 1
    caches, rest = lru.fetch_nearest_cache("m", [1, 2])
    assert contents(caches) == [1]
    assert rest == [2]


@pytest.mark.parametrize("arguments", [(-1,), (1.5,), (True,), (2, -1)])
def test_wrong_limits_are_refused(arguments: Any) -> None:
    with pytest.raises((KvCacheError, TypeError)):
        LRUPromptCache(*arguments)


def test_cache_types_are_known() -> None:
    lru = LRUPromptCache()
    for kind in ("assistant", "user", "system"):
        lru.insert_cache("m", [hash(kind) % 1000, 1], entry(1, 1), cache_type=kind)
    assert set(lru.stats_by_type()) >= {"assistant", "user", "system"}
    with pytest.raises(KvCacheError):
        lru.insert_cache("m", [5, 5], entry(5, 5), cache_type="nobody")
