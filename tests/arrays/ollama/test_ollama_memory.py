"""Memory that is not there: the call raises MemoryError and the cache is what it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ollama_support import (
    LARGE_CALLS,
    add_shift,
    distinct,
    fragmented,
    made,
    picture,
    recurrent,
    twin,
    two,
)

from pykvcache.arrays import (
    CacheConfig,
    CausalCache,
    EncoderCache,
    FlatKVCache,
    RecurrentCache,
    SWACache,
    WrapperCache,
)
from pykvcache.errors import CacheValueError

# What allocates arrays in these caches, by the names that they call it.
ALLOCATING = ("array", "concatenate", "empty", "flatnonzero", "full", "repeat", "where", "zeros")


class Failing(np.ndarray[Any, Any]):
    """Keys of a layer; the n-th time that some of them are copied there is no memory."""

    left = -1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, np.ndarray):
            if Failing.left == 0:
                raise MemoryError
            Failing.left -= 1
        return super().__getitem__(index)


def failing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Let the allocation `at` of the caches fail, and none after it."""
    left = [at]

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith("pykvcache.arrays."):
                left[0] -= 1
                if left[0] == -1:
                    raise MemoryError
            return function(*args, **options)

        return call

    for name in ALLOCATING:
        monkeypatch.setattr(np, name, wrapped(getattr(np, name)))


def wrapped() -> Any:
    return two(WrapperCache(CausalCache(add_shift), SWACache(2, add_shift)))


def put_states(cache: Any) -> None:
    cache.start_forward([0, 0], [2, 3])
    cache.put_state("sum", np.ones((2, 1)))


CALLS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: two(CausalCache()), lambda cache: cache.start_forward([5], [0])),
    (lambda: two(CausalCache()), lambda cache: cache.start_forward([5, 3, 0], [0, 1, 2])),
    (lambda: two(CausalCache(add_shift)), lambda cache: cache.remove(0, 1, 2)),
    (lambda: two(CausalCache()), lambda cache: cache.remove(0, 0)),
    (lambda: two(CausalCache()), lambda cache: cache.copy_prefix(0, 1, 2)),
    (lambda: two(CausalCache()), lambda cache: cache.copy_prefix(0, 9, 2)),
    (recurrent, lambda cache: cache.start_forward([0], [1])),
    *LARGE_CALLS,
]


@pytest.mark.parametrize(("make", "call"), CALLS)
def test_any_allocation_that_fails_changes_nothing(
    make: Callable[[], Any], call: Callable[[Any], Any]
) -> None:
    before = picture(make(), (0, 1, 2, 3, 9))
    at = 0
    while True:
        cache = make()
        with pytest.MonkeyPatch.context() as monkeypatch:
            failing(monkeypatch, at)
            try:
                call(cache)
                break
            except MemoryError:
                pass
        assert picture(cache, (0, 1, 2, 3, 9)) == before, at
        call(cache)
        at += 1
    assert at


# Found: the cells of a batch stayed taken when there was no memory for its mask.
def test_a_mask_that_cannot_be_made_leaves_the_cells_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = distinct(made(CausalCache(), 1, 4, 4), 0, 2)
    before = picture(cache)

    def no_memory(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("pykvcache.arrays.ollama._forward.batch_mask", no_memory)
        for _ in range(3):
            with pytest.raises(MemoryError):
                cache.start_forward([2, 3], [0, 0])
    assert picture(cache) == before
    cache.start_forward([2, 3], [0, 0])


# Found: the first caches of a wrapper kept the batch for whose mask the last had no memory.
def test_a_wrapper_starts_all_caches_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = RecurrentCache(checkpoint_min_pos=0, checkpoint_interval=1)
    caches = SWACache(2), recurrent, EncoderCache(), CausalCache()
    wrapper = made(WrapperCache(*caches), 1, 16, 8)
    wrapper.start_forward(range(5), [0] * 5)
    for kind in (0, 1, 3):
        wrapper.set_layer_type(kind)
        wrapper.put(np.arange(5.0).reshape(5, 1, 1), np.arange(5.0).reshape(5, 1, 1))
    recurrent.put_state("sum", np.ones((1, 1)))
    asked = caches[0], caches[1], caches[3]
    before = [picture(cache) for cache in asked]
    passes = [cache.get()[2] for cache in asked]
    from pykvcache.arrays.ollama import _forward

    made_before = _forward.batch_mask
    for fails in range(3):
        left = [fails]

        def mask(*args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise MemoryError
            return made_before(*args)

        with monkeypatch.context() as patched:
            patched.setattr(_forward, "batch_mask", mask)
            with pytest.raises(MemoryError):
                wrapper.start_forward([5, 6], [0, 0], multimodal=[0])
        assert [picture(cache) for cache in asked] == before
        assert all(cache.get()[2] is mask for cache, mask in zip(asked, passes, strict=True))
        assert wrapper.underlying_cache is caches[3]
    wrapper.start_forward([5, 6], [0, 0])


# Found: positions had moved and their K and V had not, when there was no memory for those.
@pytest.mark.parametrize("slides", [False, True])
def test_defragmenting_keeps_positions_with_their_data(
    monkeypatch: pytest.MonkeyPatch, slides: bool
) -> None:
    # With a window, cells move to places that the window gives up in the same call.
    def make() -> Any:
        if not slides:
            return fragmented()
        cache = made(SWACache(2), 1, 16, 8)
        cache.start_forward([0, 3, 1, 2] * 2, [0] * 4 + [1] * 4)
        for layer in (0, 1):
            cache.set_layer(layer)
            numbers = np.arange(8.0).reshape(8, 1, 1) + 100 * layer
            cache.put(numbers, -numbers)
        return cache

    def call(cache: Any) -> None:
        batch = ([4, 5, 6], [0, 0, 0]) if slides else ([0, 1, 2], [9, 9, 9])
        cache.start_forward(*batch)

    monkeypatch.setattr("pykvcache.arrays.ollama._layers._PIECE", 1)
    sequences = (0, 1, 3, 5, 9)
    before, moved = picture(make(), sequences), 0
    for at in range(100):
        cache = make()
        cache.get()
        for layer in cache._setup.store.layers.values():
            layer.keys, layer.values = layer.keys.view(Failing), layer.values.view(Failing)
        Failing.left = at
        try:
            call(cache)
        except MemoryError:
            moved += 1
            Failing.left = -1
            assert picture(cache, sequences) == before, at
        else:
            break
    Failing.left = -1
    assert moved > 1
    done = make()
    call(done)
    assert picture(cache, sequences) == picture(done, sequences)


# Found: the table of sequences believed in rows for which there had been no memory.
def test_a_table_of_sequences_that_cannot_grow_still_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at in range(6):
        cache = made(CausalCache(), 1, 16, 4)
        for seq in range(3):
            cache.start_forward([0], [seq])
        with monkeypatch.context() as patched:
            failing_concatenate(patched, at)
            with pytest.raises(MemoryError):
                cache.start_forward([0], [9])
            with pytest.raises(MemoryError):
                cache.copy_prefix(0, 9, 1)
        assert not picture(cache, (9,)).count("(9, 0, [(")
        cache.remove(9, 0)
        cache.copy_prefix(0, 9, 1)
        cache.start_forward([1], [9])


def failing_concatenate(patched: pytest.MonkeyPatch, at: int) -> None:
    concatenate, calls = np.concatenate, [0]

    def call(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_name in ("_grow", "<listcomp>"):
            calls[0] += 1
            if calls[0] % (at + 1) == 0:
                raise MemoryError
        return concatenate(*args, **options)

    patched.setattr(np, "concatenate", call)


def test_states_are_stored_for_all_sequences_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = recurrent()
    cache.start_forward([5, 0], [0, 1])
    before = cache.get_state("sum", (1,)).tolist()
    array, calls = np.array, [0]

    def no_memory(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError
        return array(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr("pykvcache.arrays.ollama.recurrent.np.array", no_memory)
        with pytest.raises(MemoryError):
            cache.put_state("sum", array([[7.0], [8.0]]))
    assert cache.get_state("sum", (1,)).tolist() == before


# Found: 2**62 rows of padding were accepted, and an untyped ValueError came after the cells.
def test_sizes_that_no_array_has_are_refused() -> None:
    for padding in (2**31, 2**62, 10**5000):
        for name in ("cache_padding", "mask_batch_padding"):
            with pytest.raises(CacheValueError, match=name):
                CacheConfig(**{name: padding})
    for sizes in ((2**31 - 1, 2**31 - 1, 1), (2**16, 2**15, 1)):
        with pytest.raises(CacheValueError, match="at most 2147483647"):
            CausalCache().init(np.float32, *sizes)
    with pytest.raises(CacheValueError, match="at most"):
        FlatKVCache(1, 10**5000, 1)
    cache = RecurrentCache()
    cache.init(np.float32, 1, 4, 4)
    cache.start_forward([0], [0])
    for shape in ((-1,), (2**62,), (2**40, 2**40, 0)):
        with pytest.raises(CacheValueError):
            cache.get_state("s", shape)


def test_a_mask_of_more_bytes_than_there_can_be_is_refused() -> None:
    cache = CausalCache()
    config = CacheConfig(mask_batch_padding=2**31 - 1, mask_dtype=np.float64)
    cache.set_config(config)
    cache.init(np.float32, 1, 8, 8)
    before = twin(cache)
    with pytest.raises((CacheValueError, MemoryError)):
        cache.start_forward([0] * 8, range(8))
    assert cache.can_resume(0, 0) == before.can_resume(0, 0)
