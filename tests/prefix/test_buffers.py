"""Buffers are reused after their last reference, never before, and the free list is bounded."""

from __future__ import annotations

import random
import threading

import numpy as np

from pykvcache.prefix.memory import MIN_POOLED_BYTES, BufferPool

SIZE = MIN_POOLED_BYTES


def test_random_use_lends_no_memory_twice() -> None:
    for seed in range(10):
        draw = random.Random(seed)
        pool = BufferPool(SIZE, 5 * SIZE)
        lent: list[np.ndarray] = []
        for step in range(200):
            if draw.random() < 0.55:
                array = pool.take(SIZE - draw.randrange(100))
                array[:] = step % 251
                lent.append(
                    (array, array[7:9], np.asarray(memoryview(array)[5:9]))[draw.randrange(3)]
                )
                del array
            elif lent:
                lent.pop(draw.randrange(len(lent)))
            else:
                pool.trim(draw.randrange(4) * SIZE)
            assert 0 <= pool.free_bytes <= 5 * SIZE
            assert all((array == array[0]).all() for array in lent), (seed, step)


def test_what_is_small_or_beyond_the_limit_or_after_close_is_freed() -> None:
    small, pool = BufferPool(SIZE - 1, 1 << 30), BufferPool(SIZE, 3 * SIZE)
    assert small.take(SIZE - 1).nbytes == SIZE - 1
    assert pool.take(SIZE // 2).nbytes == SIZE // 2
    assert pool.take(SIZE + 1).nbytes == SIZE + 1
    assert small.free_bytes == pool.free_bytes == 0
    lent = [pool.take(SIZE) for _ in range(5)]
    del lent[1:]
    assert pool.free_bytes == 3 * SIZE
    pool.trim(SIZE + 1)
    assert pool.free_bytes == SIZE
    pool.close()
    lent.clear()
    assert pool.free_bytes == 0


def test_threads_drop_arrays_of_one_another() -> None:
    pool, box, wrong = BufferPool(SIZE, 4 * SIZE), list[np.ndarray](), list[int]()

    def work(seed: int) -> None:
        for i in range(500):
            array = pool.take(SIZE)
            array[:64] = (seed + i) % 251
            box.append(array)
            del array
            other = box.pop()
            if (other[:64] != other[0]).any():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(40 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 < pool.free_bytes <= 4 * SIZE
