"""How a preallocated buffer grows, and keys and values that grow side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.errors import CacheDTypeError, CacheValueError

__all__ = ["STEP", "TokenPair", "grow", "grown_capacity"]

#: Capacities are multiples of this many tokens, as in mlx-lm.
STEP = 256

_ALL = slice(None)
# Objects, text and times are not tensor elements. Neither are raw bytes and records (void), but
# the kind "V" is also that of bfloat16 and its like, which other packages add.
_REFUSED_KINDS = "OSUMm"


def grown_capacity(capacity: int, needed: int, limit: int | None = None) -> int:
    """Return the next capacity that holds `needed` tokens.

    A multiple of ``STEP``, and once that is more than a step, half as much again as
    `capacity`: growing by a fixed step, as mlx-lm does, would copy n**2 / 512 tokens to
    store n of them one by one; this way each is copied about twice.

    Parameters
    ----------
    capacity, needed : int
        Tokens that fit now, and that have to fit.
    limit : int, optional
        Never more than this, unless `needed` is.
    """
    steps = -(-max(needed, capacity + capacity // 2) // STEP) if capacity else -(-needed // STEP)
    grown = steps * STEP
    return grown if limit is None else max(needed, min(grown, limit))


def grow(buffer: NDArray[Any], axis: int, first: int, last: int, capacity: int) -> NDArray[Any]:
    """Return a buffer of `capacity` along `axis` that begins with ``buffer[first:last]``.

    What comes after is uninitialised: it must be written before it is shown.
    """
    shape = list(buffer.shape)
    shape[axis] = capacity
    grown = np.empty(shape, buffer.dtype)
    grown.swapaxes(0, axis)[: last - first] = buffer.swapaxes(0, axis)[first:last]
    return grown


class TokenPair:
    """Keys and values of one layer, `(batch, n_kv_heads, n_tokens, head_dim)` each.

    The tokens are ``keys[:, :, start:length]``; room after them grows on demand. Head
    sizes and dtypes of keys and values may differ. Given arrays become the buffers
    without a copy: hand over only what nobody else holds.
    """

    __slots__ = (
        "_capacity", "_k_dtype", "_k_one", "_k_rows", "_v_dtype", "_v_one", "_v_rows",
        "keys", "length", "start", "values",
    )  # fmt: skip

    def __init__(
        self,
        keys: NDArray[Any] | None = None,
        values: NDArray[Any] | None = None,
        start: int = 0,
        length: int | None = None,
    ) -> None:
        nothing = np.empty((0, 0, 0, 0), np.float32)
        self._bind(nothing if keys is None else keys, nothing if values is None else values)
        self.start = start
        self.length: int = self._capacity if length is None else length

    def __reduce__(self) -> tuple[object, ...]:
        # The row views must be made anew, or a deep copy would write beside its buffers.
        return TokenPair, (self.keys, self.values, self.start, self.length)

    def _bind(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self.keys, self.values = keys, values
        batch, heads, self._capacity, k_dim = keys.shape
        self._k_one, self._k_dtype = (batch, heads, 1, k_dim), keys.dtype
        self._v_one, self._v_dtype = (batch, heads, 1, values.shape[3]), values.dtype
        # With the token axis first, storing a token is one integer index: twice as fast.
        self._k_rows = keys.transpose(2, 0, 1, 3)[:, :, :, None]
        self._v_rows = values.transpose(2, 0, 1, 3)[:, :, :, None]

    @classmethod
    def copied(
        cls, keys: NDArray[Any], values: NDArray[Any], limit: int | None = None
    ) -> TokenPair:
        """Copy `keys` and `values` into buffers with some room after them."""
        n = keys.shape[2]
        capacity = grown_capacity(0, n, limit)
        return cls(grow(keys, 2, 0, n, capacity), grow(values, 2, 0, n, capacity), 0, n)

    @property
    def count(self) -> int:
        """Tokens that are stored."""
        return self.length - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def view(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return views of the stored keys and values."""
        tokens = (_ALL, _ALL, slice(self.start, self.length))
        return self.keys[tokens], self.values[tokens]

    def check(self, keys: NDArray[Any], values: NDArray[Any]) -> int:
        """Return how many tokens `keys` and `values` hold, or say why they do not fit."""
        if self._is_one(keys, values):
            return 1
        for name, array in (("keys", keys), ("values", values)):
            if not isinstance(array, np.ndarray):
                raise CacheDTypeError(
                    f"{name} must be a NumPy array, not {type(array).__name__}",
                    name,
                    type(array).__name__,
                    "ndarray",
                )
            if array.dtype.kind in _REFUSED_KINDS or array.dtype.type is np.void:
                raise CacheDTypeError(
                    f"{name} have dtype {array.dtype}, which is not a number",
                    name,
                    str(array.dtype),
                )
            if array.ndim != 4:
                raise CacheValueError(
                    f"{name} have shape {array.shape}; "
                    "expected (batch, n_kv_heads, n_tokens, head_dim)",
                    name,
                    array.shape,
                    4,
                )
        if keys.shape[:3] != values.shape[:3]:
            raise CacheValueError(
                f"keys {keys.shape} and values {values.shape} differ before the last axis",
                "keys and values",
                (keys.shape, values.shape),
            )
        if keys.shape[2] < 1:
            raise CacheValueError(
                f"keys have shape {keys.shape}; expected at least one token", "keys", keys.shape, 1
            )
        if self.count and not self._same_layout(keys, values):
            raise CacheValueError(
                f"keys {keys.shape} and values {values.shape} do not continue the stored "
                f"{self.keys.shape[:2]} by {self._k_one[3]} and {self._v_one[3]}",
                "keys and values",
                (keys.shape, values.shape),
                (*self.keys.shape[:2], self._k_one[3], self._v_one[3]),
            )
        if self.count and (keys.dtype != self._k_dtype or values.dtype != self._v_dtype):
            raise CacheDTypeError(
                f"dtypes {keys.dtype} and {values.dtype}; "
                f"stored are {self._k_dtype} and {self._v_dtype}",
                "dtypes of keys and values",
                (str(keys.dtype), str(values.dtype)),
                (str(self._k_dtype), str(self._v_dtype)),
            )
        return int(keys.shape[2])

    def _same_layout(self, keys: NDArray[Any], values: NDArray[Any]) -> bool:
        return (
            (*keys.shape[:2], 1, keys.shape[3]) == self._k_one
            and (*values.shape[:2], 1, values.shape[3]) == self._v_one
        )  # fmt: skip

    def append(
        self,
        keys: NDArray[Any],
        values: NDArray[Any],
        limit: int | None = None,
        *,
        exact: bool = False,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Store `keys` and `values` after the others; return views of all of them.

        A buffer grows to at most `limit` tokens, or what is needed; a new one has no room to
        spare if it shall be `exact`.
        """
        last = self.length
        try:  # `_is_one`, written out: a call would cost a tenth of storing the token
            one = (
                last < self._capacity
                and keys.shape == self._k_one
                and values.shape == self._v_one
                and keys.dtype == self._k_dtype
                and values.dtype == self._v_dtype
            )
        except AttributeError:
            one = False
        if one:
            self._k_rows[last] = keys
            self._v_rows[last] = values
            self.length = last = last + 1
        else:
            n = self.check(keys, values)
            self._reserve(keys, values, n, n if exact and not self.count else limit)
            self.length = last = self.length + n
            self.keys[:, :, last - n : last] = keys
            self.values[:, :, last - n : last] = values
        tokens = (_ALL, _ALL, slice(self.start, last))
        return self.keys[tokens], self.values[tokens]

    def replace_one(self, row: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Write one token that `check` has accepted over the one in `row`."""
        self._k_rows[row] = keys
        self._v_rows[row] = values

    def _is_one(self, keys: NDArray[Any], values: NDArray[Any]) -> bool:
        # The quick way through `check` for the usual single token.
        try:
            return (
                keys.shape == self._k_one
                and values.shape == self._v_one
                and keys.dtype == self._k_dtype
                and values.dtype == self._v_dtype
            )
        except AttributeError:
            return False

    def _reserve(self, keys: NDArray[Any], values: NDArray[Any], n: int, limit: int | None) -> None:
        same = self._same_layout(keys, values) and keys.dtype == self._k_dtype
        if not (same and values.dtype == self._v_dtype):  # only when nothing is stored
            self._bind(
                np.empty((*keys.shape[:2], 0, keys.shape[3]), keys.dtype),
                np.empty((*values.shape[:2], 0, values.shape[3]), values.dtype),
            )
            self.start = self.length = 0
        if self.length + n > self._capacity:
            first, last, count = self.start, self.length, self.count
            # Dropping a front may leave enough room; only what is stored decides.
            capacity = grown_capacity(count, count + n, limit)
            self._bind(
                grow(self.keys, 2, first, last, capacity),
                grow(self.values, 2, first, last, capacity),
            )
            self.start, self.length = 0, count
