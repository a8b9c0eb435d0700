"""What is handed in and out: copies, read-only views, arrays of other kinds."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from mlx_makers import (
    ONE,
    THREE,
    TWO_ROWS,
    batch,
    filled,
    prompts,
    quantized,
    ring,
    rings,
    seen,
    several_plain,
    slots,
)
from mlx_reference import snapshot, stored

from pykvcache.arrays import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    LRUPromptCache,
    PromptTrie,
    QuantizedKVCache,
    RotatingKVCache,
    TokenBuffer,
)
from pykvcache.errors import CacheDTypeError


def test_keys_and_values_of_the_cache_itself_may_be_swapped():
    """A full ring writes where the new token may lie."""
    x, y = np.full((1, 1, 1, 1), 1.0), np.full((1, 1, 1, 1), 2.0)
    for cache in (RotatingKVCache(1), BatchRotatingKVCache(1, [0])):
        keys, values = cache.update(x, y)
        keys, values = cache.update(values, keys)
        assert (keys.item(), values.item()) == (2, 1)


@pytest.mark.parametrize("n", [1, 2])
def test_keys_and_values_that_were_trimmed_may_be_swapped(n):
    """The place they come from is where they are written."""
    x = np.arange(1.0, 4).reshape(1, 1, 3, 1)
    for cache in (KVCache(), ChunkedKVCache(8), RotatingKVCache(8), BatchKVCache([0])):
        keys, values = cache.update(x, -x)
        assert cache.trim(n) == n
        keys, values = cache.update(values[:, :, -n:], keys[:, :, -n:])
        assert keys.ravel()[-n:].tolist() == (-x).ravel()[-n:].tolist(), type(cache)
        assert values.ravel()[-n:].tolist() == x.ravel()[-n:].tolist(), type(cache)


class Foreign:
    """Shape and dtype as an array's, of a package that does not convert it unasked."""

    def __init__(self, array):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __array__(self, *arguments, **options):
        raise TypeError("no conversion")


@pytest.mark.parametrize("make", [KVCache, lambda: ring(1, 2, 3, 4), lambda: rings(1)])
def test_what_is_no_array_is_refused_and_nothing_written(make):
    cache = make()
    for _ in range(2):  # when empty, and by the quick way
        before = snapshot(cache)
        for pair in ((ONE[0], Foreign(ONE[1])), (Foreign(ONE[0]), ONE[1])):
            with pytest.raises(CacheDTypeError):
                cache.update(*pair)
            assert snapshot(cache) == before
        cache.update(*ONE)


@pytest.mark.parametrize(
    "make",
    [
        KVCache,
        ConcatenateKVCache,
        lambda: ChunkedKVCache(2),
        lambda: RotatingKVCache(2),
        lambda: BatchKVCache([0]),
        lambda: BatchRotatingKVCache(2, [0]),
        lambda: QuantizedKVCache(4, 8),
    ],
)
def test_what_update_returns_can_be_read_only(make):
    cache = make()
    for new in (ONE, ONE, THREE, ONE):
        keys, values = (
            cache.update_quantized(*new)
            if isinstance(cache, QuantizedKVCache)
            else cache.update(*new)
        )
        for found in (*keys, *values, *cache.state[0], *cache.state[1]):
            assert not found.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                found[...] = 5


def test_slots_may_be_written_to():
    """As in mlx-lm, where a layer changes its state in place."""
    cache = slots()
    cache[0][:] = 5
    assert (cache[0] == 5).all()
    buffer = TokenBuffer([1, 2])
    assert not buffer.tokens.flags.writeable
    assert not buffer.update([3]).flags.writeable


def test_masked_arrays_are_stored_as_plain_ones():
    masked = np.ma.array(np.ones((1, 1, 2, 64), np.float32), mask=True)
    for cache in (
        KVCache(),
        ConcatenateKVCache(),
        RotatingKVCache(3),
        BatchRotatingKVCache(3, [0]),
    ):
        for _ in range(3):
            assert [type(found) for found in cache.update(masked, masked)] == [np.ndarray] * 2
        assert type(cache.state[0]) is np.ndarray
    cache = QuantizedKVCache()
    assert cache.update(masked, masked)[0].tolist() == np.ones((1, 1, 2, 64)).tolist()
    cache = ArraysCache(1)
    cache[0] = masked
    assert type(cache[0]) is np.ndarray


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 2 has it")
def test_strings_are_no_numbers():
    text = np.array([[[["text"]]]], np.dtypes.StringDType())
    for strings in (text, text.astype("U4"), text.astype("U4").astype("S4")):
        with pytest.raises(CacheDTypeError):
            KVCache().update(strings, strings)
        with pytest.raises(CacheDTypeError):
            ArraysCache(1)[0] = strings


MAKERS = {
    "plain": lambda: filled(KVCache(), [[1]]),
    "ring": lambda: ring(1, 2),
    "chunked": lambda: filled(ChunkedKVCache(2), [[1, 2, 3]]),
    "quantized": quantized,
    "batch": batch,
    "rings": rings,
    "slots": slots,
    "list": several_plain,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_shallow_copy_is_a_cache_of_its_own(make):
    for how in (copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))):
        cache = make()
        before = seen(cache)
        twin = how(cache)
        assert seen(twin) == before
        if isinstance(cache, CacheList):
            twin[0].update(*ONE)
        elif isinstance(cache, ArraysCache):
            twin[0][:] = 5
        else:
            twin.update(*(TWO_ROWS if hasattr(cache, "batch_size") else ONE))
        assert seen(cache) == before
        assert seen(twin) != before


def test_shallow_copies_of_prompts_are_of_their_own():
    lru = prompts()
    before = seen(lru)
    twin = copy.copy(lru)
    twin.insert_cache("m", [9], [filled(KVCache(), [[9]])])
    assert seen(lru) == before
    trie = PromptTrie()
    trie.add("m", [1, 2], "value")
    copy.copy(trie).add("m", [1], "other")
    assert trie.search("m", [1]).exact is None
    buffer = TokenBuffer([1])
    copy.copy(buffer).update([2])
    buffer.update([3])
    assert buffer.tokens.tolist() == [1, 3]


def test_long_prompts_are_copied_and_pickled():
    """A node within a node for each token is too deep for pickle."""
    tokens = [*range(5000)]
    lru = LRUPromptCache()
    lru.insert_cache("m", tokens, [filled(KVCache(), [[1, 2, 3]])])
    trie = PromptTrie()
    for branch in ([9, 1, 1], [9, 2], [9], [*tokens], []):
        trie.add("m", branch, len(branch))
    for how in (copy.deepcopy, copy.copy, lambda c: pickle.loads(pickle.dumps(c))):
        again = how(lru)
        assert stored(again.fetch_nearest_cache("m", tokens)[0][0]) == [1, 2, 3]
        assert (len(again), again.nbytes) == (1, lru.nbytes)
        twin = how(trie)
        assert twin.get("m", tokens) == 5000
        assert [*twin.continuations("m", [])] == [*trie.continuations("m", [])]
        assert twin.search("m", [9, 3]) == trie.search("m", [9, 3])


@pytest.mark.parametrize("base", [KVCache, QuantizedKVCache, CacheList, ArraysCache])
def test_a_subclass_may_copy_itself_by_copy_copy(base):
    """Found: the two called each other without end."""

    class Mine(base):
        def copy(self):
            twin = copy.copy(self)
            twin.note = "copied"
            return twin

    mine = Mine(1) if base is ArraysCache else Mine()
    assert mine.copy().note == "copied"
    assert copy.copy(mine) is not mine


@pytest.mark.parametrize("base", [KVCache, RotatingKVCache, QuantizedKVCache])
def test_slots_of_a_subclass_are_copied(base):
    """Found: copy() lost them."""

    class Slotted(base):
        __slots__ = ("__hidden", "extra", "unset")

        def mark(self):
            self.__hidden, self.extra, self.more = 1, 2, 3

        def marks(self):
            return self.__hidden, self.extra, self.more, hasattr(self, "unset")

    cache = Slotted(4) if base is RotatingKVCache else Slotted()
    cache.mark()
    for twin in (cache.copy(), copy.copy(cache), copy.deepcopy(cache)):
        assert twin.marks() == (1, 2, 3, False)
