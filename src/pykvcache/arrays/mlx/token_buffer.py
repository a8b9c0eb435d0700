"""Token ids that grow as a cache does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays.mlx._growth import grow, grown_capacity
from pykvcache.errors import CacheDTypeError, CacheValueError

__all__ = ["TokenBuffer"]

_INT32 = np.iinfo(np.int32)


class TokenBuffer:
    """A growing row of int32 token ids, by steps of 256.

    It follows mlx-lm's ``TokenBuffer``; appending costs O(1) copies on average.

    Parameters
    ----------
    tokens : sequence of int, optional
        What is in it at first.
    """

    def __init__(self, tokens: Sequence[int] | NDArray[Any] = ()) -> None:
        self._buffer = np.empty(0, np.int32)
        self._size = 0
        self.update(tokens)

    def __len__(self) -> int:
        return self._size

    def update(self, tokens: Sequence[int] | NDArray[Any]) -> NDArray[np.int32]:
        """Append `tokens`; return a read-only view of all of them.

        Raises
        ------
        CacheDTypeError
            Not integers.
        CacheValueError
            Not one row, or an id that does not fit int32.
        """
        try:
            new = np.asarray(tokens)
        except ValueError as error:
            raise CacheDTypeError(
                f"tokens are not a row of integers: {error}", "tokens", type(tokens).__name__
            ) from None
        if new.ndim != 1:
            raise CacheValueError(
                f"tokens have shape {new.shape}; expected one row", "tokens", new.shape, 1
            )
        if new.size and new.dtype.kind not in "iu":
            raise CacheDTypeError(
                f"tokens have dtype {new.dtype}; expected integers",
                "tokens",
                str(new.dtype),
                "integers",
            )
        # Among integers, NumPy takes a bool for one of them.
        if new is not tokens and not {bool, np.bool_}.isdisjoint(map(type, tokens)):
            raise CacheDTypeError(
                "tokens hold a bool; expected integers", "tokens", "bool", "integers"
            )
        if new.size and (new.min() < _INT32.min or new.max() > _INT32.max):
            raise CacheValueError(
                "a token id does not fit int32",
                "tokens",
                (int(new.min()), int(new.max())),
                (_INT32.min, _INT32.max),
            )
        end = self._size + new.size
        if end > self._buffer.size:
            capacity = grown_capacity(self._buffer.size, end)
            self._buffer = grow(self._buffer, 0, 0, self._size, capacity)
        self._buffer[self._size : end] = new
        found = self._seen(end)
        self._size = end
        return found

    def __copy__(self) -> TokenBuffer:
        # A shallow copy would share the buffer, but not the count of what is in it.
        return type(self)(self.tokens)

    def _seen(self, end: int) -> NDArray[np.int32]:
        view = self._buffer[:end]
        view.flags.writeable = False
        return view

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, as a read-only view."""
        return self._seen(self._size)

    @property
    def state(self) -> NDArray[np.int32]:
        """All tokens, as a view (mlx-lm gives the spare room as well)."""
        return self.tokens
