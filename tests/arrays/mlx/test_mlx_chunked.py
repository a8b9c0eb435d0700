import numpy as np
import pytest
from mlx_reference import HEADS, K_DIM, V_DIM, ids, kv, snapshot, stored

from pykvcache.arrays import ChunkedKVCache, from_state
from pykvcache.errors import CacheValueError


def test_front_is_trimmed_to_the_chunk():
    """ChunkedKVCache: maybe_trim_front drops the front beyond chunk and moves start_position."""
    cache = ChunkedKVCache(4)
    cache.update(*kv([1, 2, 3]))
    cache.maybe_trim_front()
    assert stored(cache) == [1, 2, 3]
    assert cache.start_position == 0
    cache.update(*kv([4, 5, 6]))
    cache.maybe_trim_front()
    assert stored(cache) == [3, 4, 5, 6]
    assert (cache.start_position, cache.offset, cache.chunk_size) == (2, 6, 4)
    assert ids(cache.update(*kv([7]))[1]) == [3, 4, 5, 6, 7]
    assert cache.offset == 7
    assert cache.size() == 5


def test_spare_room_is_not_counted_as_tokens():
    """ChunkedKVCache: only stored tokens count (mlx-lm counts the buffer)."""
    cache = ChunkedKVCache(100)
    cache.update(*kv([1]))
    cache.maybe_trim_front()
    assert cache.start_position == 0
    assert stored(cache) == [1]


def test_trim_goes_back_to_start_position_at_most():
    """ChunkedKVCache: trim <= offset - start."""
    cache = ChunkedKVCache(3)
    cache.update(*kv([1, 2, 3, 4, 5]))
    cache.maybe_trim_front()
    assert cache.is_trimmable()
    assert cache.trim(1) == 1
    assert stored(cache) == [3, 4]
    assert cache.offset == 4
    assert cache.trim(9) == 2
    assert cache.offset == cache.start_position == 2
    assert cache.is_empty()


def test_front_trimmed_cache_survives_saving():
    """ChunkedKVCache: meta (chunk, start) and state restore the offset (mlx-lm flaw)."""
    cache = ChunkedKVCache(4)
    cache.update(*kv([*range(10)]))
    cache.maybe_trim_front()
    assert cache.meta_state == ("4", "6")
    again = from_state("ChunkedKVCache", cache.state, cache.meta_state)
    assert snapshot(again) == snapshot(cache)
    assert again.offset == 10
    assert again.start_position == 6
    assert ids(again.update(*kv([10]))[1]) == [6, 7, 8, 9, 10]


def test_chunked_mask_is_causal_over_the_stored_tokens():
    """Masks: a chunked mask is causal over the stored tokens."""
    cache = ChunkedKVCache(3)
    cache.update(*kv([*range(8)]))
    cache.maybe_trim_front()
    assert cache.make_mask(1) is None
    assert cache.make_mask(2) == "causal"
    mask = cache.make_mask(2, return_array=True)
    assert mask.astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_trimming_the_front_keeps_memory_bounded():
    """ChunkedKVCache: decoding with maybe_trim_front neither grows nor copies every token."""
    cache, token = ChunkedKVCache(300), HEADS * (K_DIM + V_DIM) * 4
    buffers = set()
    for n in range(3000):
        cache.maybe_trim_front()
        keys, _ = cache.update(*kv([n % 2000]))
        buffers.add(keys.base.__array_interface__["data"][0])
    assert cache.nbytes <= 1024 * token
    assert cache.offset == 3000
    assert cache.start_position == 3000 - 301
    assert stored(cache) == [n % 2000 for n in range(2699, 3000)]


def test_chunked_copy_keeps_its_place():
    cache = ChunkedKVCache(3)
    cache.update(*kv([1, 2, 3, 4, 5]))
    cache.maybe_trim_front()
    twin = cache.copy()
    assert snapshot(twin) == snapshot(cache)
    twin.update(*kv([6]))
    twin.maybe_trim_front()
    assert stored(cache) == [3, 4, 5]
    assert stored(twin) == [4, 5, 6]
    assert not np.shares_memory(cache.state[0], twin.state[0])


@pytest.mark.parametrize("meta", [(), ("4",), ("0", "0"), ("4", "-1"), ("4", None)])
def test_chunked_meta_must_be_two_numbers(meta):
    with pytest.raises(CacheValueError):
        from_state("ChunkedKVCache", kv([1]), meta)
    with pytest.raises(CacheValueError):
        ChunkedKVCache(0)
