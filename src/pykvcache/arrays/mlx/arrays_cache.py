"""Caches of recurrent layers: a few arrays of fixed size instead of a history."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from pykvcache.arrays._checks import MOST, as_int, as_kind, check_size
from pykvcache.arrays.mlx.base import (
    Arrays,
    BaseCache,
    Counts,
    Rows,
    announced,
    check_alike,
    parse_int,
    row_counts,
    row_indices,
    summed,
)
from pykvcache.arrays.mlx.token_pair import plain_numbers
from pykvcache.errors import CacheOrderError, CacheValueError, NotSupported, shown

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ArraysCache", "MambaCache"]

# Limit for files: a damaged number of slots must not exhaust the memory.
_MAX_SLOTS = 65_536


class ArraysCache(BaseCache):
    """Numbered slots for arrays whose first axis is the batch.

    Modelled on mlx-lm's ``ArraysCache``: ``cache[i] = array`` stores a copy, ``cache[i]`` is the
    stored array itself, which may be written to, or None.

    Parameters
    ----------
    size : int
        Number of slots.
    left_padding : sequence of int, shape (batch,), optional
        Columns at the beginning of the coming input that hold no token.
    """

    def __init__(self, size: SupportsIndex, left_padding: Counts | None = None) -> None:
        count = as_int("size", size, minimum=0, maximum=_MAX_SLOTS)
        self._slots: tuple[NDArray[Any] | None, ...] = (None,) * count
        self._padding = None if left_padding is None else row_counts("left_padding", left_padding)
        self._lengths: Rows | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: SupportsIndex) -> NDArray[Any] | None:
        return self._slots[as_int("slot", index, minimum=0, maximum=len(self._slots) - 1)]

    def __setitem__(self, index: SupportsIndex, array: NDArray[Any] | None) -> None:
        slot = as_int("slot", index, minimum=0, maximum=len(self._slots) - 1)
        self._slots = (*self._slots[:slot], _checked_slot(array), *self._slots[slot + 1 :])

    @property
    def offset(self) -> int:
        """Always 0: a recurrent state has no positions."""
        return 0

    @property
    def left_padding(self) -> Rows | None:
        """Columns at the beginning of the coming input that hold no token, a copy; or None."""
        return None if self._padding is None else self._padding.copy()

    @property
    def lengths(self) -> Rows | None:
        """Tokens still to come in each row, a copy; None unless `prepare` has set it."""
        return None if self._lengths is None else self._lengths.copy()

    @property
    def batch_size(self) -> int:
        """Rows of the first array, else of `left_padding`, else of `lengths`, else 1."""
        for array in self._slots:
            if array is not None:
                return int(array.shape[0])
        for counts in (self._padding, self._lengths):
            if counts is not None:
                return counts.size
        return 1

    def _rows(self) -> int | None:
        """Return the number of rows; None if no array, padding or length determines it."""
        return _common_rows((*self._slots, self._padding, self._lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self._slots if array is not None)

    def update(self, keys: NDArray[Any], values: NDArray[Any]) -> Arrays:
        """Raise ``NotSupported``: the cache has slots, no keys and values."""
        name = type(self).__name__
        message = f"a {name} has slots: set cache[i] instead of updating"
        raise NotSupported(message, "update", name)

    def prepare(
        self,
        *,
        left_padding: Counts | None = None,
        lengths: Counts | None = None,
        right_padding: Counts | None = None,
    ) -> None:
        """Announce the coming input: tokens per row, or more columns of padding.

        `right_padding` is accepted for the other caches of a list, but not used; `lengths` has the
        information. Left padding on a cache with content raises ``CacheValueError``.
        """
        batch = self.batch_size if not self.is_empty() or self._padding is not None else None
        if batch is None and lengths is None and self._lengths is not None:
            batch = self._lengths.size  # lengths stay
        left, real, _ = announced(self, batch, left_padding, lengths, right_padding)
        if left is not None:
            old = self._padding
            self._padding = left if old is None else summed("left_padding", old, left)
        if real is not None:
            self._lengths = real

    def finalize(self) -> None:
        """Clear `lengths` and `left_padding`, at the end of the prompt."""
        self._lengths = self._padding = None

    def advance(self, n: SupportsIndex) -> None:
        """Subtract `n` columns of input from `lengths` and `left_padding`."""
        n = as_int("n", n, minimum=0, maximum=MOST)
        less = np.array([-n])
        lengths = None if self._lengths is None else summed("lengths", self._lengths, less)
        padding = None if self._padding is None else summed("left_padding", self._padding, less)
        self._lengths, self._padding = lengths, padding

    def make_mask(
        self, n: SupportsIndex, window_size: SupportsIndex | None = None, return_array: bool = False
    ) -> NDArray[np.bool_] | None:
        """Return which of the next `n` columns hold tokens, `(batch, n)`; None = all.

        Tokens are in the columns from `left_padding` to `lengths`, if set.
        """
        columns = np.arange(as_int("n", n, minimum=1, maximum=MOST))
        if self._padding is not None and self._lengths is not None:
            self._rows()  # raises unless both have the same number of rows
        mask = None if self._padding is None else columns >= self._padding[:, None]
        if self._lengths is not None:
            before = columns < self._lengths[:, None]
            mask = before if mask is None else mask & before
        return mask

    def size(self) -> int:
        """Return 0: a recurrent state has no tokens."""
        return 0

    def is_empty(self) -> bool:
        """Return whether no slot is filled."""
        return all(array is None for array in self._slots)

    def _with_slots(self, slots: tuple[NDArray[Any] | None, ...]) -> Self:
        """Return a copy with other slots, without copying the old ones."""
        return copy.deepcopy(self, {id(self._slots): slots})

    def filter(self, batch_indices: Counts) -> None:
        """Keep the given rows, in that order.

        A cache without arrays, `left_padding` and `lengths` has no rows yet; any indices are valid.
        """
        rows = row_indices(batch_indices, self._rows())
        self._slots = tuple(None if array is None else array[rows] for array in self._slots)
        self._padding = None if self._padding is None else self._padding[rows]
        self._lengths = None if self._lengths is None else self._lengths[rows]

    def extend(self, other: ArraysCache) -> None:
        """Append the rows of `other`; zeros if one side has no array.

        A cache without rows counts as one row; in a `CacheList`, as many rows as the other
        members have. `lengths` on only one side raise ``CacheOrderError``.
        """
        self._extend(other, 1, 1)

    def _extend(self, other: BaseCache, mine: int, others: int) -> None:
        """Extend; `mine` and `others` are row counts for caches without rows."""
        other = as_kind("other", other, ArraysCache)
        check_size("slots of other", len(other), len(self))
        known = self._rows(), other._rows()
        counts = (mine if known[0] is None else known[0], others if known[1] is None else known[1])
        if (self._lengths is None) != (other._lengths is None):
            # Zeros would mean that the other rows get no token.
            message = "finalize() should be called before extend: one has lengths"
            raise CacheOrderError(message, "finalize")
        pairs = zip(self._slots, other._slots, strict=True)
        slots = tuple(_stacked(pair, counts) for pair in pairs)
        padding = _stacked((self._padding, other._padding), counts)
        lengths = _stacked((self._lengths, other._lengths), counts)
        self._slots, self._padding, self._lengths = slots, padding, lengths

    def extract(self, index: SupportsIndex) -> Self:
        """Return row `index` as a separate cache, without `left_padding` and `lengths`."""
        rows = self._rows()
        row = as_int("index", index, minimum=0, maximum=None if rows is None else rows - 1)
        alone = self._with_slots(
            tuple(None if array is None else array[row : row + 1].copy() for array in self._slots)
        )
        alone.finalize()
        return alone

    @classmethod
    def merge(cls, caches: Iterable[Self]) -> Self:
        """Return a batch of `caches` with one row each.

        A missing array becomes zeros; if all are missing, `left_padding` is zeros. Coming
        padding is kept (mlx-lm forgets it); `lengths` must be finalized first.
        """
        caches = list(caches)
        if not caches:
            message = "there is no cache to merge; expected at least one"
            raise CacheValueError(message, "caches", 0, 1)
        for cache in caches:
            as_kind("caches", cache, ArraysCache)
            check_size("slots to merge", len(cache), len(caches[0]))
            check_size("rows of a cache to merge", cache._rows() or 1, 1)
            if cache._lengths is not None:
                raise CacheOrderError("finalize() should be called before merge", "finalize")
        counts = (1,) * len(caches)
        columns = zip(*(cache._slots for cache in caches), strict=True)
        batch = caches[0]._with_slots(tuple(_stacked(column, counts) for column in columns))
        batch.finalize()
        padding = _stacked([np.zeros(1, np.int64), *(c._padding for c in caches)], (1, *counts))
        if padding is not None and (batch.is_empty() or (padding > 0).any()):
            batch._padding = padding[1:]
        return batch

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays of all slots, None for an empty one; ``()`` if all are empty."""
        return () if self.is_empty() else self._slots

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        slots = tuple(_checked_slot(array) for array in state) or (None,) * len(self._slots)
        self._set_slots(slots)

    def _set_slots(self, slots: tuple[NDArray[Any] | None, ...]) -> None:
        as_int("slots", len(slots), maximum=_MAX_SLOTS)
        self._slots = slots

    @property
    def meta_state(self) -> tuple[str, ...]:
        """``()``, as in mlx-lm, if all slots are filled and no padding is set.

        Else the number of slots, `left_padding` and `lengths`, each as comma-separated text,
        empty for None.
        """
        announced = self._padding is not None or self._lengths is not None
        if not announced and all(array is not None for array in self._slots):
            return ()
        return (
            str(len(self._slots)),
            *("" if c is None else ",".join(map(str, c)) for c in (self._padding, self._lengths)),
        )

    @meta_state.setter
    def meta_state(self, meta: Sequence[Any]) -> None:
        padding = lengths = None
        slots = self._slots
        if len(meta):
            if len(meta) != 3 or not all(isinstance(text, str) for text in meta):
                message = f"the meta state of an ArraysCache is 3 texts; got {shown(meta)}"
                raise CacheValueError(message, "meta_state", meta, 3)
            least = 0 if self.is_empty() else len(slots)
            size = as_int(
                "slots", parse_int("meta_state", meta[0]), minimum=least, maximum=_MAX_SLOTS
            )
            padding, lengths = _slot_counts(meta[1]), _slot_counts(meta[2])
            slots = (*slots, *(None,) * size)[:size]
        _common_rows((*slots, padding, lengths))
        self._set_slots(slots)
        self._padding, self._lengths = padding, lengths


class MambaCache(ArraysCache):
    """An `ArraysCache` of two slots: convolution state and recurrent state.

    Parameters
    ----------
    left_padding : sequence of int, shape (batch,), optional
        Columns at the beginning of the coming input that hold no token.
    """

    def __init__(self, left_padding: Counts | None = None) -> None:
        super().__init__(2, left_padding)

    def _set_slots(self, slots: tuple[NDArray[Any] | None, ...]) -> None:
        check_size("slots of a MambaCache", len(slots), 2)
        super()._set_slots(slots)


def _checked_slot(array: NDArray[Any] | None) -> NDArray[Any] | None:
    """Return a copy of an array for a slot."""
    if array is None:
        return None
    array = plain_numbers("slot", array)
    if array.ndim < 1:
        message = "a slot holds arrays whose first axis is the batch; got a scalar"
        raise CacheValueError(message, "slot", array.shape, 1)
    copied: NDArray[Any] = array.copy()
    return copied


def _common_rows(parts: Sequence[NDArray[Any] | None]) -> int | None:
    """Return the common number of rows; None without parts; raise if they differ."""
    sizes = sorted({int(part.shape[0]) for part in parts if part is not None})
    if len(sizes) > 1:
        message = f"slots, left_padding and lengths must not differ in rows; got {shown(sizes)}"
        raise CacheValueError(message, "rows", sizes)
    return next(iter(sizes), None)


def _stacked(arrays: Sequence[NDArray[Any] | None], rows: Sequence[int]) -> NDArray[Any] | None:
    """Stack arrays along the batch; a missing one becomes zeros of as many rows."""
    given = [array for array in arrays if array is not None]
    if not given:
        return None
    first = check_alike("arrays", given, slice(1, None))
    parts = [
        np.zeros((count, *first.shape[1:]), first.dtype) if array is None else array
        for array, count in zip(arrays, rows, strict=True)
    ]
    return np.concatenate(parts)


def _slot_counts(text: str) -> Rows | None:
    """Parse comma-separated numbers of the meta state; None if empty."""
    if not text:
        return None
    numbers = [parse_int("meta_state", part) for part in text.split(",")]
    return row_counts("counts of rows", numbers, signed=True)
