"""TokenPair, growing buffers of keys and values, and the base classes of caches that are one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import as_int, check_shape, check_size
from pykvcache.arrays.mlx.base import Arrays, BaseCache, Mask, Rows, check_alike, row_counts
from pykvcache.arrays.mlx.masks import create_causal_mask
from pykvcache.errors import CacheDTypeError, CacheOrderError, CacheValueError, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "STEP",
    "BatchCache",
    "PairCache",
    "TokenPair",
    "grow",
    "grown_capacity",
    "joined",
    "plain_numbers",
    "right_justified",
    "state_pair",
]

#: Capacities are multiples of this many tokens, as in mlx-lm.
STEP = 256

_ALL = slice(None)
_NDARRAY = np.ndarray
# Booleans and numbers. Kind "V" covers raw bytes and records, and bfloat16 and similar types of
# other packages.
_KINDS = "biufcV"


def grown_capacity(capacity: int, needed: int, limit: int | None = None) -> int:
    """Return the next capacity for `needed` tokens.

    A multiple of ``STEP``, and beyond one step 1.5 times `capacity`. Growing by a fixed step, as
    in mlx-lm, would copy n**2 / 512 tokens to store n one by one; this way each is copied about
    twice. `limit` is the maximum, unless `needed` exceeds it.
    """
    steps = -(-max(needed, capacity + capacity // 2 if capacity else 0) // STEP)
    return steps * STEP if limit is None else max(needed, min(steps * STEP, limit))


def grow(buffer: NDArray[Any], first: int, last: int, capacity: int, axis: int = 2) -> NDArray[Any]:
    """Return a buffer of `capacity` along `axis` that starts with ``buffer[first:last]``.

    The rest is uninitialised.
    """
    shape = (*buffer.shape[:axis], capacity, *buffer.shape[axis + 1 :])
    grown = np.empty(check_shape("the buffer", shape, buffer.dtype), buffer.dtype)
    grown.swapaxes(0, axis)[: last - first] = buffer.swapaxes(0, axis)[first:last]
    return grown


def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate arrays of keys or values; raise if the result is too large for an array."""
    batch, heads, _, dim = parts[0].shape
    shape = batch, heads, sum(part.shape[2] for part in parts), dim
    check_shape("the history", shape, parts[0].dtype)
    return np.concatenate(parts, axis=2)


def plain_numbers(name: str, array: object) -> NDArray[Any]:
    """Return an array of numbers as a plain ndarray; raise `CacheDTypeError` for anything else.

    Attributes of a subclass, such as the mask of a masked array, are not stored.
    """
    if not isinstance(array, _NDARRAY):
        found = type(array).__name__
        raise CacheDTypeError(f"{name} must be a NumPy array, not {found}", name, found, "ndarray")
    plain = np.asarray(array)
    if plain.dtype.kind not in _KINDS or plain.dtype.type is np.void:
        message = f"{name} must hold numbers; the dtype is {shown(plain.dtype)}"
        raise CacheDTypeError(message, name, str(plain.dtype))
    return plain


class TokenPair:
    """Keys and values of one layer, `(batch, n_kv_heads, n_tokens, head_dim)` each.

    The tokens are ``keys[:, :, start:length]``; spare room after them grows on demand. Head sizes
    and dtypes of keys and values may differ. The constructor does not copy its arrays. Returned
    views are read-only.
    """

    def __init__(
        self, keys: NDArray[Any] | None = None, values: NDArray[Any] | None = None
    ) -> None:
        nothing = np.empty((0, 0, 0, 0), np.float32)
        keys = nothing if keys is None else keys
        self._bind(keys, nothing if values is None else values, keys.shape[2])

    def __reduce__(self) -> tuple[object, ...]:
        # Recreate the row views: deep copies of them would not be views of the new buffers.
        stored = _ALL, _ALL, slice(self.start, self.length)
        return TokenPair, (self.keys[stored], self.values[stored])

    def _bind(self, keys: NDArray[Any], values: NDArray[Any], length: int) -> None:
        batch, heads, self._capacity, k_dim = keys.shape
        self.keys, self.values = keys, values
        self.start, self.length = 0, length
        # Token axis first, so that storing a token is one integer index, which is twice as fast.
        self.k_rows = keys.transpose(2, 0, 1, 3)[:, :, :, None]
        self.v_rows = values.transpose(2, 0, 1, 3)[:, :, :, None]
        self._k_seen, self._v_seen = keys.view(), values.view()
        self._k_seen.flags.writeable = self._v_seen.flags.writeable = False
        self._k_one = batch, heads, 1, k_dim
        self._v_one = batch, heads, 1, values.shape[3]
        self._k_dtype, self._v_dtype = keys.dtype, values.dtype

    def first(self, count: int, limit: int | None = None) -> TokenPair:
        """Return a copy of the first `count` tokens, with spare room up to `limit` tokens."""
        capacity, last = grown_capacity(0, count, limit), self.start + count
        pair = TokenPair(
            grow(self.keys, self.start, last, capacity),
            grow(self.values, self.start, last, capacity),
        )
        pair.length = count
        return pair

    @property
    def count(self) -> int:
        """Number of stored tokens."""
        return self.length - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, used or not."""
        return self.keys.nbytes + self.values.nbytes

    def view(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return read-only views of the stored keys and values."""
        stored = (_ALL, _ALL, slice(self.start, self.length))
        return self._k_seen[stored], self._v_seen[stored]

    def check(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return `keys` and `values` as plain arrays; raise if they do not fit the stored ones."""
        # Fast path for a single token.
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
                message = (
                    f"{name} have shape {array.shape}; "
                    "expected (batch, n_kv_heads, n_tokens, head_dim)"
                )
                raise CacheValueError(message, name, array.shape, 4)
        shapes = keys.shape, values.shape
        if keys.shape[:3] != values.shape[:3]:
            message = f"keys {shapes[0]} and values {shapes[1]} differ before the last axis"
            raise CacheValueError(message, "keys and values", shapes)
        if keys.shape[2] < 1:
            message = f"keys have shape {keys.shape}; expected at least one token"
            raise CacheValueError(message, "keys", keys.shape, 1)
        if not self.count:
            return keys, values
        if not self._same_layout(keys, values):
            stored = (*self.keys.shape[:2], self._k_one[3], self._v_one[3])
            message = (
                f"keys {shapes[0]} and values {shapes[1]} do not fit the stored ones: "
                f"batch and heads {stored[:2]}, head sizes {stored[2]} and {stored[3]}"
            )
            raise CacheValueError(message, "keys and values", shapes, stored)
        if keys.dtype != self._k_dtype or values.dtype != self._v_dtype:
            found = str(keys.dtype), str(values.dtype)
            kept = str(self._k_dtype), str(self._v_dtype)
            message = f"dtypes {found[0]} and {found[1]}; stored are {kept[0]} and {kept[1]}"
            raise CacheDTypeError(message, "dtypes of keys and values", found, kept)
        return keys, values

    def _same_layout(self, keys: NDArray[Any], values: NDArray[Any]) -> bool:
        k_one, v_one = (*keys.shape[:2], 1, keys.shape[3]), (*values.shape[:2], 1, values.shape[3])
        return k_one == self._k_one and v_one == self._v_one

    def append(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Append `keys` and `values`; return views of all tokens."""
        last = self.length
        # `check`'s fast path, inlined: a call would cost a tenth of storing a token.
        if (
            last < self._capacity
            and type(keys) is _NDARRAY
            and type(values) is _NDARRAY
            and keys.shape == self._k_one
            and values.shape == self._v_one
            and keys.dtype == self._k_dtype
            and values.dtype == self._v_dtype
            # Keys are written first, so values that are a view of them must be copied.
            and (values.base is None or not np.may_share_memory(values, self.keys))
        ):
            self.k_rows[last] = keys
            self.v_rows[last] = values
            self.length = last + 1
        else:
            self.put(*self.check(keys, values))
        stored = (_ALL, _ALL, slice(self.start, self.length))
        return self._k_seen[stored], self._v_seen[stored]

    def put(
        self,
        keys: NDArray[Any],
        values: NDArray[Any],
        limit: int | None = None,
        *,
        exact: bool = False,
    ) -> None:
        """Append checked arrays.

        A buffer grows to at most `limit` tokens, or as many as needed; with `exact`, a new one has
        no spare room.
        """
        n = int(keys.shape[2])
        self._reserve(keys, values, n, n if exact and not self.count else limit)
        if values.base is not None and np.may_share_memory(values, self.keys):
            values = values.copy()
        last = self.length
        self.keys[:, :, last : last + n] = keys
        self.values[:, :, last : last + n] = values
        self.length = last + n

    def _reserve(self, keys: NDArray[Any], values: NDArray[Any], n: int, limit: int | None) -> None:
        first, last, count = self.start, self.length, self.count
        old_keys, old_values = self.keys, self.values
        same = self._same_layout(keys, values) and keys.dtype == self._k_dtype
        if not (same and values.dtype == self._v_dtype):  # only when empty
            first = last = count = 0
            old_keys, old_values = keys, values
        elif last + n <= self._capacity:
            return
        # Room of a dropped front is reused: only the stored tokens move.
        capacity = grown_capacity(count, count + n, limit)
        grown_keys = grow(old_keys, first, last, capacity)
        self._bind(grown_keys, grow(old_values, first, last, capacity), count)

    def take(self, rows: Rows, first: int = 0) -> TokenPair:
        """Return copies of `rows`, starting at column `first`."""
        keys, values = self.view()
        return TokenPair(keys[:, :, first:][rows], values[:, :, first:][rows])

    def rolled(self, shifts: Rows) -> TokenPair:
        """Return a copy with row `i` rolled right by ``shifts[i]`` columns."""
        keys, values = (array.copy() for array in self.view())
        for row in np.flatnonzero(shifts):
            keys[row] = np.roll(keys[row], shifts[row], axis=1)
            values[row] = np.roll(values[row], shifts[row], axis=1)
        return TokenPair(keys, values)


def right_justified(parts: Sequence[tuple[int, TokenPair]]) -> TokenPair:
    """Stack ``(rows, pair)`` so that their newest tokens share the last column; pad with zeros."""
    filled = [pair.view() for _, pair in parts if pair.count]
    for count, pair in parts:
        if pair.count:
            check_size("rows of a cache to merge", pair.keys.shape[0], count)
    if not filled:
        return TokenPair()
    rows, columns = sum(count for count, _ in parts), max(keys.shape[2] for keys, _ in filled)
    stacked = []
    for i in (0, 1):
        # Heads and head size; rows and tokens may differ.
        first = check_alike("caches", [pair[i] for pair in filled], slice(1, None, 2))
        together = np.zeros((rows, first.shape[1], columns, first.shape[3]), first.dtype)
        top = 0
        for count, part in parts:
            if part.count:
                together[top : top + count, :, columns - part.count :] = part.view()[i]
            top += count
        stacked.append(together)
    return TokenPair(*stacked)


def state_pair(state: Sequence[Any], limit: int | None = None) -> TokenPair:
    """Copy a ``(keys, values)`` state, or ``()``, into a `TokenPair` of at most `limit` tokens."""
    empty = TokenPair()
    if len(state) == 0:
        return empty
    check_size("arrays of a state, keys and values", len(state), 2)
    keys, values = state
    # mlx-lm saves zero tokens after a full trim.
    if all(isinstance(a, np.ndarray) and a.ndim == 4 and a.shape[2] == 0 for a in (keys, values)):
        return empty
    given = TokenPair(*empty.check(keys, values))
    return given.first(given.count, limit)


class PairCache(BaseCache):
    """A cache whose keys and values are one `TokenPair`; a base class."""

    def __init__(self) -> None:
        self._pair = TokenPair()

    @property
    def _pairs(self) -> tuple[TokenPair, ...]:
        """All pairs; more than one if keys and values have several parts."""
        return (self._pair,)

    @property
    def offset(self) -> int:
        """Number of stored tokens, which is the position of the next one."""
        return self._pair.count

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return sum(pair.nbytes for pair in self._pairs)

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values)`` as views of exactly the stored tokens; ``()`` when empty."""
        return self._pair.view() if self._pair.count else ()

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        self._pair = state_pair(state)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Store new tokens; return views of all keys and values.

        Raises
        ------
        CacheValueError
            A shape does not fit the stored tokens, or has no token.
        CacheDTypeError
            The arguments are not NumPy arrays of numbers, or differ in dtype from stored tokens.
        """
        return self._pair.append(keys, values)

    def is_trimmable(self) -> bool:
        """Return True."""
        return True

    def trim(self, n: SupportsIndex) -> int:
        """Drop the newest `n` tokens, or all if fewer; return the number, 0 if not trimmable."""
        dropped = min(as_int("n", n, minimum=0), self._pair.count)
        if not self.is_trimmable():
            return 0
        for pair in self._pairs:
            pair.length -= dropped
        return dropped

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> Mask:
        """Return the mask for `n` new tokens over the stored ones and themselves.

        With a window it is always an array, `(n, stored + n)`; without one a single token needs
        no mask.
        """
        n = as_int("n", n, minimum=1)
        if window_size is not None:
            return create_causal_mask(n, self._pair.count, window_size)
        if n == 1:
            return None
        return create_causal_mask(n, self._pair.count) if return_array else "causal"

    def size(self) -> int:
        """Return the number of stored tokens that the next one can see."""
        return self._pair.count

    def is_empty(self) -> bool:
        """Return whether the cache has no tokens."""
        return self._pair.count == 0

    def _copied(self, n: int = 0) -> Self | None:
        if n and not (self.is_trimmable() and n <= self._pair.count):
            return None
        count = self._pair.count - n
        return deepcopy(self, {id(pair): pair.first(count, self.max_size) for pair in self._pairs})


class BatchCache(PairCache):
    """Rows of several sequences, padded on the left; a base class."""

    # Left padding of each row, counted from the first column seen.
    _padding: Rows
    _signed = False  # whether a state's padding may be negative
    # Announced right padding, or what says where it is; None if there is none.
    _pending: Rows | None = None

    @property
    def left_padding(self) -> Rows:
        """Columns of each row without a token, counted from the oldest one, a copy."""
        return np.maximum(self._padding - (self.offset - self._pair.count), 0)

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self._padding.size

    def _rows(self) -> int:
        return self._padding.size

    def advance(self, n: SupportsIndex) -> None:
        """Do nothing; only recurrent caches in the same list use this call."""
        as_int("n", n, minimum=0)

    def is_trimmable(self) -> bool:
        """Return whether no right padding is pending, and no ring has dropped a column.

        `trim` drops columns of all rows and keeps the padding.
        """
        return super().is_trimmable() and self._pending is None

    def _refuse_pending(self, operation: str) -> None:
        if self._pending is not None:
            message = f"finalize() should be called before {operation}"
            raise CacheOrderError(message, "finalize", operation)

    @property
    def state(self) -> tuple[Any, ...]:
        """``(keys, values, rope_offset, left_padding)``; ``()`` when empty.

        The padding of an empty batch is in `meta_state`; setting ``()`` keeps the padding. The
        columns of a ring are in ring order; setting them assumes order of age, and `meta_state`
        sets another index.
        """
        self._refuse_pending("state")
        if self._pair.count == 0:
            return ()
        return (*self._pair.view(), self.rope_offset, self.left_padding)

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        if len(state) == 0:
            pair, padding = TokenPair(), self.left_padding
            row_offset: Rows = -padding
        else:
            check_size(f"arrays of a {type(self).__name__}", len(state), 4)
            pair = state_pair(state[:2], self.max_size)
            batch = pair.keys.shape[0] if pair.count else None
            row_offset = row_counts("rope_offset", state[2], batch, signed=True)
            padding = row_counts("left_padding", state[3], row_offset.size, signed=self._signed)
        self._set_state(pair, padding, row_offset, pair.count)
        self._pending = None

    @abstractmethod
    def _set_state(self, pair: TokenPair, padding: Rows, row_offset: Rows, offset: int) -> None:
        """Set columns in order of age, the numbers of their rows, and the columns seen."""

    def _aged(self) -> TokenPair:
        """Return the columns in order of age."""
        return self._pair

    def _append_rows(self, other: BatchCache) -> None:
        """Append the rows of another batch of the same class, aligned at the newest column."""
        both = self, other
        for batch in both:
            batch._refuse_pending("extend")
        pair = right_justified([(batch.batch_size, batch._aged()) for batch in both])
        columns = [batch.left_padding + (pair.count - batch._pair.count) for batch in both]
        padding = row_counts("left_padding", np.concatenate(columns))
        row_offset = np.concatenate([np.asarray(batch.rope_offset) for batch in both])
        self._set_state(pair, padding, row_offset, max(self.offset, other.offset))
