"""The pool that blocks get their memory from: lent once, taken back once, and counted."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
import threading
import tracemalloc

import numpy as np
import pytest

from pykvcache._native.memory_pool import (
    SPARE_BYTES,
    MemoryPool,
    drop_spare,
    referred,
    spare_bytes,
)
from pykvcache.errors import ArgumentError
from support.short_memory import run_short_of_memory

SIZE = 4096


def test_random_use_lends_nothing_twice_and_counts_all() -> None:
    drop_spare()
    for seed in range(20):
        draw = random.Random(seed)
        pool = MemoryPool(SIZE, draw.randrange(8) * SIZE)
        lent: list[np.ndarray] = []
        for step in range(400):
            match draw.randrange(8):
                case 0 | 1 | 2:
                    new = pool.lend_arrays(draw.randint(1, SIZE), draw.randrange(4))
                    while new:
                        lent.append(new.pop())
                        lent[-1][:] = len(lent) % 251
                case 3 | 4:
                    while lent and draw.random() < 0.7:
                        index = draw.randrange(len(lent))
                        lent[index], lent[-1] = lent[-1], lent[index]
                        lent.pop()
                case 5:
                    pool.most_bytes = draw.randrange(8) * SIZE
                    pool.shrink(pool.most_bytes)
                case 6:
                    pool.expect(draw.randrange(6))
                case _:
                    pool.wipe()
            assert pool.n_lent == len(lent)
            assert 0 <= pool.n_bytes <= 8 * SIZE
            spans = sorted((a.ctypes.data, a.nbytes) for a in lent)
            assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
            assert all((array == array[0]).all() for array in lent), (seed, step)
        pool.close()
        lent.clear()
        assert pool.n_lent == pool.n_bytes == 0
        drop_spare()


def test_what_is_due_is_free_and_does_not_count() -> None:
    pool = MemoryPool(SIZE, 0)
    lent = pool.lend_arrays(SIZE, 5)
    pool.expect(3)
    lent.clear()
    assert pool.n_bytes == 0
    assert pool.kept_bytes == 3 * SIZE
    again = pool.lend_arrays(SIZE, 2)
    pool.expect(0)  # one was not needed
    assert pool.n_bytes == 0
    del again
    assert pool.n_bytes == 0, "nothing is due any more"


def test_all_that_was_taken_is_given_back() -> None:
    drop_spare()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        pool = MemoryPool(1 << 20, 64 << 20)
        lent = pool.lend_arrays(1 << 20, 30)
        assert tracemalloc.get_traced_memory()[0] - before > 30 << 20, "seen by tracemalloc"
        view = lent[0][5:9]
        lent.clear()
        del pool  # lent memory keeps it
        assert tracemalloc.get_traced_memory()[0] - before < (31 << 20)
        del view
        assert tracemalloc.get_traced_memory()[0] - before < 1 << 16
    finally:
        tracemalloc.stop()


def test_closed_ones_leave_no_more_than_they_may() -> None:
    drop_spare()
    pools = [MemoryPool(1 << 20, 64 << 20) for _ in range(3)]
    for lent in [pool.lend_arrays(1 << 20, 10) for pool in pools]:
        for array in lent:
            array[:] = 7
    del lent, array
    for pool in pools:
        assert pool.n_bytes == 10 << 20
        pool.close()
        pool.close()
        assert pool.n_bytes == 0
    assert spare_bytes() == SPARE_BYTES
    new = MemoryPool(1 << 20, 64 << 20)
    assert not any(array.any() for array in new.lend_arrays(1 << 20, 16)), "written over"
    assert spare_bytes() == 0
    drop_spare()


def test_threads_get_and_drop_each_others_memory() -> None:
    pool = MemoryPool(SIZE, 4 * SIZE)
    box: list[np.ndarray] = []
    wrong: list[int] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            if draw.random() < 0.5 or not box:
                (array,) = pool.lend_arrays(SIZE, 1)
                array[:] = draw.randrange(256)
                box.append(array)
            else:
                try:
                    array = box.pop(draw.randrange(len(box)))
                except (IndexError, ValueError):
                    continue
                if (array != array[0]).any():
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    adder = threading.Thread(target=lambda: [pool.add() for _ in range(300)])
    for thread in [*threads, adder]:
        thread.start()
    for thread in [*threads, adder]:
        thread.join()
    assert not wrong
    assert pool.n_lent == len(box)
    box.clear()
    assert pool.n_lent == 0
    assert pool.n_bytes <= 4 * SIZE


def test_bad_arguments_are_refused_with_their_limit() -> None:
    with pytest.raises(ArgumentError, match="size is 0"):
        MemoryPool(0, 0)
    with pytest.raises((ArgumentError, OverflowError)):
        MemoryPool(2**63, 0)
    pool = MemoryPool(SIZE, 0)
    for size in (-1, SIZE + 1, 2**62):
        with pytest.raises(ArgumentError, match=f"{size} bytes"):
            pool.lend_arrays(size, 1)
        with pytest.raises(ArgumentError, match=f"{size} bytes"):
            pool.lend_view(size)
    assert pool.n_lent == 0
    assert pool.lend_arrays(SIZE, -3) == []
    assert len(pool.lend_view(0)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems promise memory they have not")
def test_no_memory_is_an_error_that_changes_nothing() -> None:
    pool = MemoryPool(1 << 50, 1 << 52)
    with pytest.raises(MemoryError, match="bytes"):
        pool.lend_arrays(1 << 50, 3)
    with pytest.raises(MemoryError, match="bytes"):
        pool.add()
    assert pool.n_lent == pool.n_bytes == 0


def test_other_references_are_found() -> None:
    kept = [np.empty(10, np.uint8) for _ in range(4)]
    assert referred(kept[1:], 1) == []
    assert referred([], 1) == []
    view = kept[2][3:]
    (found,) = referred(kept[1:], 1)
    assert found is kept[2]
    del found, view
    other = {"a": kept[3]}
    assert len(referred(kept[:], 1)) == 1
    assert len(referred(kept[:], 0)) == 4
    other.clear()
    assert referred([None, 5, b"x"], 1) == [None, 5, b"x"], "what is no array always is"
    assert referred(kept[:], 1) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_has_its_own() -> None:
    pool = MemoryPool(SIZE, 8 * SIZE)
    lent = pool.lend_arrays(SIZE, 3)
    pid = os.fork()
    if not pid:
        lent.clear()
        os._exit(0 if (pool.n_lent, pool.n_bytes) == (0, 3 * SIZE) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (pool.n_lent, pool.n_bytes) == (3, 0)


NO_MEMORY = """
from pykvcache._native.memory_pool import MemoryPool
pool = MemoryPool(4096, 0)
for first in range(1, 12):
    for last in range(first + 1, first + 3):
        for _ in range(60):
            try: short(lambda: pool.lend_arrays(4096, 6), first, last)
            except MemoryError: pass
assert pool.n_lent == 0
"""


@pytest.mark.parametrize("allocator", ["pymalloc", "malloc"])
def test_a_list_that_cannot_grow_frees_nothing_twice(allocator: str) -> None:
    """Cython's list comprehensions do: the process ended."""
    run_short_of_memory(NO_MEMORY, PYTHONMALLOC=allocator)
