"""BufferPool: evicted blocks leave their memory to the blocks that are stored next."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BufferPool"]

Array = npt.NDArray[np.uint8]

#: Smaller buffers come from the allocator, which reuses their memory by itself.
MIN_POOLED_BYTES = 128 << 10


class BufferPool:
    """Lend byte arrays; reuse the memory of those that nothing refers to any more.

    The system clears each page of new memory at the first write: filling 37 MB of new buffers
    takes 50 ms, of reused ones 10 ms.

    Any thread may call any method and drop any array. No lock is held.

    Parameters
    ----------
    size : int
        Bytes of a pooled buffer, usually those of a block.
    max_bytes : int
        Limit of the free list in bytes. What comes back beyond it goes to the allocator.
    """

    def __init__(self, size: int, max_bytes: int) -> None:
        self.size = size
        self._max_free = max_bytes // size if size >= MIN_POOLED_BYTES else 0
        self._buffer_type = _buffer_type(size)
        self._free: list[Array] = []

    @property
    def free_bytes(self) -> int:
        """Bytes in the free list. Arrays that are in use do not count."""
        return len(self._free) * self.size

    def take(self, n_bytes: int) -> Array:
        """Return a writable array of ``n_bytes`` arbitrary bytes.

        Only sizes within 1 % of `size` are pooled, because each of them occupies a whole buffer.
        The memory is reused when neither the array nor a view of it is left.

        Raises
        ------
        MemoryError
            The allocator has no memory.
        """
        if not self._max_free or not 0.99 * self.size < n_bytes <= self.size:
            return np.empty(n_bytes, np.uint8)
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self.size, np.uint8)
        buffer = self._buffer_type.from_buffer(memory)
        buffer.pool, buffer.memory = self, memory
        return np.frombuffer(buffer, np.uint8, n_bytes)

    def trim(self, max_bytes: int = 0) -> None:
        """Free memory until the free list has at most ``max_bytes`` bytes."""
        del self._free[max(0, max_bytes) // self.size :]

    def close(self) -> None:
        """Free the free list; arrays that are in use are freed when they are dropped."""
        self._max_free = 0
        self.trim()

    def _put_back(self, memory: Array) -> None:
        if len(self._free) < self._max_free:
            self._free.append(memory)


def _buffer_type(size: int) -> Any:
    """Return a type whose instances give their memory back to their pool when they end."""

    class Buffer(ctypes.Array[ctypes.c_uint8]):
        _type_ = ctypes.c_uint8
        _length_ = size
        __slots__ = ("memory", "pool")
        pool: BufferPool
        memory: Array

        def __del__(self) -> None:
            self.pool._put_back(self.memory)

    return Buffer
