"""How a preallocated buffer grows, and keys and values that grow side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import check_shape
from pykvcache.errors import CacheDTypeError, CacheValueError
from pykvcache.errors._shown import shown

__all__ = ["STEP", "TokenPair", "grow", "grown_capacity", "joined", "plain_numbers"]

#: Capacities are multiples of this many tokens, as in mlx-lm.
STEP = 256

_ALL = slice(None)
_NDARRAY = np.ndarray
# Truth values and numbers. Raw bytes and records (void) are neither, but the kind "V" is also
# that of bfloat16 and its like, which other packages add.
_KINDS = "biufcV"


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
    shape = (*buffer.shape[:axis], capacity, *buffer.shape[axis + 1 :])
    grown = np.empty(check_shape("the buffer", shape, buffer.dtype), buffer.dtype)
    grown.swapaxes(0, axis)[: last - first] = buffer.swapaxes(0, axis)[first:last]
    return grown


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return arrays of keys, or of values, one after the other, if an array can be so long."""
    batch, heads, _, dim = parts[0].shape
    shape = batch, heads, sum(part.shape[2] for part in parts), dim
    check_shape("the history", shape, parts[0].dtype)
    return np.concatenate(parts, axis=2)


def plain_numbers(name: str, array: object) -> NDArray[Any]:
    """Return an array of numbers as a plain ndarray, or say why it is none.

    What a subclass of NumPy's adds, as the mask of a masked array, would not be stored.
    """
    if not isinstance(array, _NDARRAY):
        found = type(array).__name__
        raise CacheDTypeError(f"{name} must be a NumPy array, not {found}", name, found, "ndarray")
    plain = np.asarray(array)
    if plain.dtype.kind not in _KINDS or plain.dtype.type is np.void:
        raise CacheDTypeError(
            f"{name} must hold numbers; the dtype is {shown(plain.dtype)}", name, str(plain.dtype)
        )
    return plain


class TokenPair:
    """Keys and values of one layer, `(batch, n_kv_heads, n_tokens, head_dim)` each.

    The tokens are ``keys[:, :, start:length]``; room after them grows on demand. Head
    sizes and dtypes of keys and values may differ. Given arrays become the buffers
    without a copy: hand over only what nobody else holds. Views that are handed out are
    read-only.
    """

    keys: NDArray[Any]
    values: NDArray[Any]
    #: The same, token axis first: storing a token is one integer index, and twice as fast.
    k_rows: NDArray[Any]
    v_rows: NDArray[Any]
    start: int
    length: int
    _k_seen: NDArray[Any]
    _v_seen: NDArray[Any]
    _capacity: int
    _k_one: tuple[int, ...]
    _v_one: tuple[int, ...]
    _k_dtype: np.dtype[Any]
    _v_dtype: np.dtype[Any]

    def __init__(
        self,
        keys: NDArray[Any] | None = None,
        values: NDArray[Any] | None = None,
        start: int = 0,
        length: int | None = None,
    ) -> None:
        nothing = np.empty((0, 0, 0, 0), np.float32)
        keys = nothing if keys is None else keys
        values = nothing if values is None else values
        self._bind(keys, values, start, keys.shape[2] if length is None else length)

    def __reduce__(self) -> tuple[object, ...]:
        # The row views must be made anew, or a deep copy would write beside its buffers.
        return TokenPair, (self.keys, self.values, self.start, self.length)

    def _bind(self, keys: NDArray[Any], values: NDArray[Any], start: int, length: int) -> None:
        batch, heads, capacity, k_dim = keys.shape
        k_seen, v_seen = keys.view(), values.view()
        k_seen.flags.writeable = v_seen.flags.writeable = False
        # One call of compiled code: an interrupt finds everything replaced, or nothing.
        self.__dict__.update(
            keys=keys,
            values=values,
            start=start,
            length=length,
            k_rows=keys.transpose(2, 0, 1, 3)[:, :, :, None],
            v_rows=values.transpose(2, 0, 1, 3)[:, :, :, None],
            _k_seen=k_seen,
            _v_seen=v_seen,
            _capacity=capacity,
            _k_one=(batch, heads, 1, k_dim),
            _v_one=(batch, heads, 1, values.shape[3]),
            _k_dtype=keys.dtype,
            _v_dtype=values.dtype,
        )

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

    def view(self, length: int | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return read-only views of the keys and values that are stored, or up to `length`."""
        tokens = (_ALL, _ALL, slice(self.start, self.length if length is None else length))
        return self._k_seen[tokens], self._v_seen[tokens]

    def check(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return `keys` and `values` as plain arrays, or say why they do not fit."""
        # The quick way for the usual single token.
        if (
            type(keys) is _NDARRAY
            and type(values) is _NDARRAY
            and keys.shape == self._k_one
            and values.shape == self._v_one
            and keys.dtype == self._k_dtype
            and values.dtype == self._v_dtype
        ):
            return keys, values
        keys, values = plain_numbers("keys", keys), plain_numbers("values", values)
        for name, array in (("keys", keys), ("values", values)):
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
        return keys, values

    def _same_layout(self, keys: NDArray[Any], values: NDArray[Any]) -> bool:
        return (
            (*keys.shape[:2], 1, keys.shape[3]) == self._k_one
            and (*values.shape[:2], 1, values.shape[3]) == self._v_one
        )  # fmt: skip

    def append(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Store `keys` and `values` after the others; return views of all of them."""
        last = self.length
        # The quick way of `check`, written out: a call would cost a tenth of storing a token.
        if (
            last < self._capacity
            and type(keys) is _NDARRAY
            and type(values) is _NDARRAY
            and keys.shape == self._k_one
            and values.shape == self._v_one
            and keys.dtype == self._k_dtype
            and values.dtype == self._v_dtype
            # Arrays that own their memory share none with the keys, which are written first.
            and (values.base is None or not np.may_share_memory(values, self.keys))
        ):
            self.k_rows[last] = keys
            self.v_rows[last] = values
            end = last + 1
        else:
            end = self.put(*self.check(keys, values))
        tokens = (_ALL, _ALL, slice(self.start, end))
        found = self._k_seen[tokens], self._v_seen[tokens]
        self.length = end  # last: whatever fails or interrupts before, nothing is stored
        return found

    def put(
        self,
        keys: NDArray[Any],
        values: NDArray[Any],
        limit: int | None = None,
        *,
        exact: bool = False,
    ) -> int:
        """Write what `check` returned after the others; return the `length` that counts it.

        A buffer grows to at most `limit` tokens, or what is needed; a new one has no room to
        spare if it shall be `exact`.
        """
        n = int(keys.shape[2])
        self._reserve(keys, values, n, n if exact and not self.count else limit)
        if values.base is not None and np.may_share_memory(values, self.keys):
            values = values.copy()
        last = self.length
        self.keys[:, :, last : last + n] = keys
        self.values[:, :, last : last + n] = values
        return last + n

    def _reserve(self, keys: NDArray[Any], values: NDArray[Any], n: int, limit: int | None) -> None:
        first, last, count = self.start, self.length, self.count
        old_keys, old_values = self.keys, self.values
        same = self._same_layout(keys, values) and keys.dtype == self._k_dtype
        if not (same and values.dtype == self._v_dtype):  # only when nothing is stored
            first = last = count = 0
            old_keys, old_values = keys, values
        elif last + n <= self._capacity:
            return
        # Dropping a front may leave enough room; only what is stored decides.
        capacity = grown_capacity(count, count + n, limit)
        grown_keys = grow(old_keys, 2, first, last, capacity)
        self._bind(grown_keys, grow(old_values, 2, first, last, capacity), 0, count)
