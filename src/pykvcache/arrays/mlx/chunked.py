"""A cache that forgets everything before the last chunk on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int
from pykvcache.arrays.mlx._base import Arrays, Mask, PairCache, meta_ints, state_pair
from pykvcache.arrays.mlx._limits import LARGEST_SIZE
from pykvcache.arrays.mlx.masks import history_mask
from pykvcache.errors import CacheValueError

__all__ = ["ChunkedKVCache"]


class ChunkedKVCache(PairCache):
    """All tokens since `start_position`, which `maybe_trim_front` moves.

    It follows mlx-lm's ``ChunkedKVCache``, with its flaws put right: a cache whose front
    was dropped survives saving and loading (there the offset is lost), only stored tokens
    count towards the chunk (there the spare room of the buffer does), and there is a mask.

    Parameters
    ----------
    chunk_size : int
        Tokens that `maybe_trim_front` leaves, at least 1.
    """

    def __init__(self, chunk_size: SupportsIndex) -> None:
        super().__init__()
        self._chunk_size = as_int("chunk_size", chunk_size, minimum=1, maximum=LARGEST_SIZE)
        self._start_position = 0

    @property
    def chunk_size(self) -> int:
        """Tokens that `maybe_trim_front` leaves."""
        return self._chunk_size

    @property
    def start_position(self) -> int:
        """Position of the oldest stored token: how many were dropped before it."""
        return self._start_position

    @property
    def offset(self) -> int:
        """Position of the next token, dropped ones counted."""
        return self._start_position + self._pair.count

    def maybe_trim_front(self) -> None:
        """Drop the oldest tokens until at most `chunk_size` are stored. Copies nothing."""
        surplus = self._pair.count - self._chunk_size
        if surplus > 0:
            self._pair.start += surplus
            self._start_position += surplus

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all that are stored. Errors as in `KVCache`."""
        return self._pair.append(keys, values)

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, at most down to `start_position`; return how many."""
        dropped = min(as_int("n", n, minimum=0), self._pair.count)
        self._pair.length -= dropped
        return dropped

    def make_mask(
        self,
        n: SupportsIndex,
        window_size: SupportsIndex | None = None,
        return_array: bool = False,
    ) -> Mask:
        """Return the mask for `n` new tokens, causal over what is stored."""
        return history_mask(n, self._pair.count, window_size, return_array)

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views of the stored tokens; ``()`` when empty.

        Setting it stores the tokens from position 0 on; `meta_state` moves them.
        """
        return super().state

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair = state_pair(state)
        self._start_position = 0

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``(chunk_size, start_position)`` as text."""
        return str(self._chunk_size), str(self._start_position)

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        chunk, start = meta_ints("ChunkedKVCache", ("chunk_size", "start_position"), meta)
        if chunk < 1:
            raise CacheValueError(
                f"chunk_size of a ChunkedKVCache is {chunk}; at least 1", "chunk_size", chunk, 1
            )
        self._chunk_size, self._start_position = chunk, start
